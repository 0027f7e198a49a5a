"""The seams of LMDeploy that this package relies on, as data, and the check that a host still has them.

The check reads the host's source with `ast`: nothing is imported, so any wheel or checkout can be checked. A seam that
does not fit is named together with the LMDeploy version, and is fatal: a changed signature that is not noticed corrupts
state silently.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from . import kept

BACKENDS: Final = "lmdeploy.pytorch.backends"
ASCEND: Final = "lmdeploy.pytorch.backends.dlinfer.ascend"
PARSERS: Final = "lmdeploy.serve.parsers"
MIXIN: Final = "lmdeploy.pytorch.models.utils.cudagraph"


class HostMismatch(RuntimeError):
    """LMDeploy does not have a seam in the form this package relies on."""


@dataclass(frozen=True)
class Seam:
    """One function, class or set of fields of the host.

    Attributes:
        hook: the hook it belongs to (H1 … H20, docs/en/hosts.md).
        module: dotted module name.
        name: qualified name in it.
        parameters: the parameter names in order for a function ("*" and "**" included), the annotated fields needed
            for a class, or None where existence is enough.
        why: what this package does with it.
    """

    hook: str
    module: str
    name: str
    parameters: tuple[str, ...] | None
    why: str


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SEAMS: Final = (
    Seam("H2", f"{ASCEND}.op_backend", "AscendOpsBackend", None, "the class we derive from"),
    Seam("H2", f"{BACKENDS}.selector", "_get_backend", (), "re-imports the backend's name at each call"),
    Seam(
        "H3",
        f"{BACKENDS}.dlinfer.op_backend",
        "DlinferOpsBackend.build_op",
        _names("cls spec * enable_deterministic"),
        "we answer the gated-delta specs and pass the others on",
    ),
    Seam("H3", f"{BACKENDS}.gated_delta_rule", "GatedDeltaMetaBuildSpec", None, "answered with our metadata"),
    Seam("H3", f"{BACKENDS}.gated_delta_rule", "GatedDeltaRuleBuildSpec", None, "answered with our rule"),
    Seam("H3", f"{BACKENDS}.causal_conv1d", "CausalConv1dBuildSpec", None, "answered with our convolution"),
    Seam(
        "H3",
        f"{BACKENDS}.gated_delta_rule",
        "GatedDeltaMetaImpl.forward",
        _names("self num_tokens conv_kernel_size state_ids attn_metadata"),
        "the metadata builder's call form",
    ),
    Seam(
        "H3",
        f"{BACKENDS}.gated_delta_rule",
        "GatedDeltaMeta.__init__",
        _names("self num_tokens conv_kernel_size state_ids attn_metadata"),
        "Qwen3-Next builds the metadata directly",
    ),
    Seam(
        "H3",
        f"{BACKENDS}.gated_delta_rule",
        "GatedDeltaRuleImpl.forward",
        _names(
            "self query key value b a dt_bias a_log_exp recurrent_state gated_delta_meta kv_ratio "
            "use_qk_l2norm_in_kernel"
        ),
        "the rule's call form",
    ),
    Seam(
        "H3",
        f"{BACKENDS}.causal_conv1d",
        "CausalConv1dImpl.forward",
        _names("self x weight bias conv_state gated_delta_meta activation"),
        "the convolution's call form",
    ),
    Seam("H3", f"{BACKENDS}.rejection_sampling", "RejectionSamplingBuildSpec", None, "answered with our sampler"),
    Seam(
        "H3",
        f"{BACKENDS}.rejection_sampling",
        "RejectionSamplingImpl.forward_greedy",
        _names("self target_token_ids draft_token_ids"),
        "the sampler's call form for a greedy batch",
    ),
    Seam(
        "H3",
        f"{BACKENDS}.rejection_sampling",
        "RejectionSamplingImpl.forward",
        _names("self target_logits draft_token_ids bonus_token_ids * is_greedy draft_probs"),
        "the sampler's call form",
    ),
    Seam("H3", f"{BACKENDS}.multinomial_sampling", "MultinomialSamplingBuildSpec", None, "answered with our draw"),
    Seam(
        "H3",
        f"{BACKENDS}.multinomial_sampling",
        "MultinomialSamplingImpl.forward",
        _names("scores seeds offsets indices"),
        "the draw's call form",
    ),
    Seam(
        "H4",
        f"{ASCEND}.op_backend",
        "AscendOpsBackend.update_step_context",
        _names("cls step_context"),
        "we keep its ring offsets off: it takes the number of delta layers for the length of a row",
    ),
    Seam(
        "H4",
        f"{BACKENDS}.dlinfer.attention",
        "DlinferAttentionMetadata",
        _names("cu_seqlens_q_cpu kv_seqlens_cpu has_initial_state is_multi_token_decoding cache_seqlens"),
        "fields read and set by our metadata",
    ),
    Seam(
        "H5",
        "lmdeploy.pytorch.nn.gated_delta",
        "build_rmsnorm_gated",
        _names("hidden_size eps **kwargs"),
        "replaced: it imports fla",
    ),
    Seam(
        "H6",
        f"{ASCEND}.op_backend",
        "AscendOpsBackend.build_graph_runner",
        _names("model model_config cache_config backend_config device"),
        "the CPU vendor pads steps as graphs do, and captures none",
    ),
    Seam("H6", f"{ASCEND}.op_backend", "AscendOpsBackend.init", (), "installs the vendor; our patches follow it"),
    Seam(
        "H6",
        f"{ASCEND}.op_backend",
        "AscendOpsBackend.get_k_block_shape",
        _names("block_size num_heads head_size dtype"),
        "asks the card's name; the CPU vendor answers without",
    ),
    Seam(
        "H6",
        f"{BACKENDS}.graph_runner",
        "GraphRunner.get_capture_batch_sizes",
        _names("self"),
        "the buckets that steps are padded to on the CPU",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMixin.support_cuda_graph",
        _names("self input_ids position_ids past_key_values attn_metadata inputs_embeds **kwargs"),
        "says which steps have a graph's shape on the CPU",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMixin.make_buffers_cudagraph",
        _names("self graph_meta input_ids position_ids past_key_values attn_metadata inputs_embeds **kwargs"),
        "makes the static buffers of a padded step on the CPU",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMixin.fill_buffers_cudagraph",
        _names("self graph_meta input_ids position_ids past_key_values attn_metadata inputs_embeds **kwargs"),
        "fills and pads them",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMixin.update_context_cudagraph",
        _names("self graph_meta context"),
        "binds the step to them",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMixin.get_outputs_cudagraph",
        _names("self output_buffers input_ids **kwargs"),
        "cuts a padded step's output to the real rows",
    ),
    Seam(
        "H6",
        MIXIN,
        "CudaGraphMeta",
        _names(
            "max_batchs max_tokens num_blocks is_decoding device input_buffers output_buffers vocab_size "
            "decode_query_len is_ssm use_mrope block_size"
        ),
        "the record of a bucket",
    ),
    Seam(
        "H6",
        "lmdeploy.pytorch.kernels.cuda.step_metadata.fill_graph_common_inputs",
        "fill_graph_common_inputs",
        _names(
            "input_ids position_ids block_offsets q_start_loc q_seqlens kv_seqlens graph_input_ids graph_position_ids "
            "graph_block_offsets qkv_lens cu_seqlens pad_query_len"
        ),
        "its plain PyTorch branch is executed without the Triton kernels around it",
    ),
    Seam(
        "H7",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        "Notifier.wait_async",
        _names("self"),
        "replaced on the CPU: it blocks the event loop in a barrier",
    ),
    Seam(
        "H7",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        "Notifier.close",
        _names("self"),
        "bounded in time on the CPU: it waits for sleepers that may be gone",
    ),
    Seam(
        "H7",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        "ExecutorProc.join",
        _names("self"),
        "bounded in time on the CPU: a worker may never end by itself",
    ),
    Seam(
        "H7",
        "lmdeploy.pytorch.engine.executor.ray_executor",
        "RayExecutor.collective_rpc",
        _names("self method args kwargs timeout"),
        "bounded in time on the CPU where it stops the workers: one may wait for the other's step",
    ),
    Seam(
        "H8",
        "lmdeploy.pytorch.config",
        "_update_torch_dtype",
        _names("config dtype device_type"),
        "wrapped on the CPU: fp32",
    ),
    Seam(
        "H9",
        "lmdeploy.pytorch.configurations.qwen3_5",
        "Qwen3_5ModelConfigBuilder.build",
        _names("cls hf_config model_path tp is_draft_model spec_method num_spec_tokens **kwargs"),
        "wrapped: the convolution pool becomes position-major",
    ),
    Seam(
        "H9",
        "lmdeploy.pytorch.configurations.qwen3_next",
        "Qwen3NextModelConfigBuilder.build",
        _names("cls hf_config model_path tp **kwargs"),
        "wrapped: the convolution pool becomes position-major",
    ),
    Seam(
        "H10",
        "lmdeploy.pytorch.engine.executor.ray_executor",
        "_update_runtime_envs",
        _names("runtime_env"),
        "wrapped: Ray's workers get this process's settings of ours beside LMDeploy's own",
    ),
    Seam(
        "H11",
        "lmdeploy.pytorch.engine.mp_engine.zmq_engine",
        "ZMQMPEngine._mp_proc",
        _names("shared_dict condition model_path engine_config log_level speculative_config **kwargs"),
        "wrapped: the engine process outlives the manager it publishes its port through",
    ),
    Seam(
        "H12",
        "lmdeploy.pytorch.spec_decode.spec_agent",
        "SpecModelAgent._rejection_sampling",
        _names("self model_inputs extra_inputs sampling_inputs"),
        "wrapped: the offset of a draw is the position of its token",
    ),
    Seam(
        "H12",
        "lmdeploy.pytorch.spec_decode.reject_sampler",
        "RejectionSampler.forward",
        _names("self target_logits draft_token_ids expanded_sampling_inputs draft_probs"),
        "wrapped: hands seeds and offsets to our sampler",
    ),
    Seam(
        "H12",
        "lmdeploy.pytorch.engine.logits_process",
        "SamplingInputs",
        _names("random_seeds random_offsets"),
        "fields read and replaced",
    ),
    *(
        Seam("H12", "lmdeploy.pytorch.engine.logits_process", name, _names(parameters), "the law at a draft's place")
        for name, parameters in (
            ("_filter_topk_sorted_", "scores topk filter_value"),
            ("_filter_topp_sorted_", "scores topp filter_value"),
            ("_filter_minp_sorted_", "scores minp filter_value"),
            ("_torch_topk", "x k dim largest sorted"),
            ("SamplingInputs", "top_k max_top_k top_p min_p"),
        )
    ),
    Seam(
        "H13",
        "lmdeploy.pytorch.paging.scheduler",
        "Scheduler.preempt_seqs",
        _names("self seqs"),
        "wrapped: a preempted sequence gives up its state",
    ),
    Seam(
        "H13",
        "lmdeploy.pytorch.paging.seq_states.states",
        "StateBase.release_paging_resources",
        _names("self"),
        "called for a preempted sequence",
    ),
    *(
        Seam("H15", module, name, _names(parameters), why)
        for module, name, parameters, why in (
            (
                "lmdeploy.pytorch.configurations.builder",
                "AutoModelConfigBuilder.build",
                "cls hf_config model_path **kwargs",
                "our config builder registers itself with it",
            ),
            (
                "lmdeploy.pytorch.config",
                "_update_torch_dtype",
                "config dtype device_type",
                "wrapped: the convolution's window follows the dtype",
            ),
            ("lmdeploy.pytorch.config", "StateCacheSpec", "name shape dtype layer_ids", "our state caches"),
            (
                "lmdeploy.pytorch.config",
                "ModelConfig",
                "hidden_size num_layers num_attention_heads num_key_value_heads head_dim k_head_dim v_head_dim "
                "vocab_size llm_config model_paradigm states_shapes state_cache_specs update_cache_config_func",
                "built by our config builder",
            ),
            (
                "lmdeploy.pytorch.engine.cache_engine.schema",
                "BlockCacheRequest",
                "name shape dtype",
                "the indexer's caches",
            ),
            (
                "lmdeploy.pytorch.engine.cache_engine.schema",
                "BlockCacheBinding",
                "cache_name consumer_row",
                "which row of a cache is a layer's",
            ),
            (
                "lmdeploy.pytorch.engine.cache_engine.collector",
                "collect_block_cache_requests",
                "model context",
                "asks modules by the names of two methods",
            ),
            (
                "lmdeploy.pytorch.spec_decode.proposers.deepseek_mtp",
                "DeepseekMTP.get_outputs",
                "self model_outputs model_inputs extra_inputs guided_processors",
                "lends the embedding, compacts the choice of tokens, norms once",
            ),
            (
                "lmdeploy.pytorch.weight_loader.model_weight_loader",
                "load_model_weights",
                "model checkpoint_path prefix device",
                "calls load_weights for each file and a method of the model after the last",
            ),
            (
                f"{BACKENDS}.attention",
                "AttentionMetadata",
                "is_decoding block_offsets q_seqlens kv_seqlens",
                "the rows of a step",
            ),
            (
                f"{BACKENDS}.dlinfer.attention",
                "DlinferAttentionMetadata",
                "cu_seqlens_q_cpu is_multi_token_decoding max_kv_seq_len",
                "the rows of a step",
            ),
        )
    ),
    *(
        Seam("H16", f"{PARSERS}.{module}", name, None if parameters is None else _names(parameters), why)
        for module, name, parameters, why in (
            (
                "response_parser",
                "BaseResponseParser.set_parsers",
                "cls reasoning_parser_name tool_parser_name tokenizer",
                "takes ours by name and shows them the tokenizer",
            ),
            (
                "response_parser",
                "BaseResponseParser.chat_template_kwargs_from_request",
                "cls request",
                "extended: a switch that the template does not have is left out",
            ),
            ("response_parser", "BaseResponseParser.__init__", "self request", "extended"),
            ("response_parser", "BaseResponseParser._consume_reasoning", "self", "replaced: a call ends the reasoning"),
            ("response_parser", "BaseResponseParser._consume_plain", "self", "extended: a late end tag is left out"),
            (
                "response_parser",
                "BaseResponseParser._update_reasoning_tokens",
                "self token_ids",
                "extended: a call ends the count too",
            ),
            (
                "response_parser",
                "BaseResponseParser._longest_open_tag_prefix_suffix",
                "text tags",
                "finds the beginning of a tag at the end of a piece",
            ),
            ("reasoning_parser.reasoning_parser", "ReasoningParser.validate_tokenizer", "cls tokenizer", "extended"),
            ("reasoning_parser.reasoning_parser", "ReasoningParser.starts_in_reasoning_mode", "self", "true in ours"),
            ("tool_parser.glm47_tool_parser", "Glm47ToolParser", None, "the class we derive from"),
            (
                "tool_parser.xml_tool_parser",
                "XmlToolParser._consume_stream_payload",
                "self text deltas * final",
                "called as if more could come: what was cut off is not closed",
            ),
            ("tool_parser.tool_parser", "dump_tools", "request", "hands on functions, which we give their form again"),
        )
    ),
    Seam(
        "H16",
        "lmdeploy.serve.openai.api_server",
        "set_parsers",
        _names("context reasoning_parser_name tool_parser_name **kwargs"),
        "takes the response parser that is registered as default",
    ),
    Seam(
        "H17",
        "lmdeploy.serve.core.async_engine",
        "AsyncEngine.preprocess",
        None,
        "wrapped: what it returns is checked before the engine takes it",
    ),
    Seam(
        "H17",
        "lmdeploy.serve.core.async_engine",
        "PreprocessedRequest",
        _names("session inputs gen_config"),
        "fields read",
    ),
    Seam(
        "H17",
        "lmdeploy.serve.openai.endpoints.common",
        "build_serving_generation_config",
        _names("request server_context **extra_kwargs"),
        "wrapped: what it asserts about is a client's error",
    ),
    Seam(
        "H18",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        "MPExecutor.release",
        _names("self"),
        "wrapped: workers are meant to end from here on",
    ),
    Seam(
        "H18",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        "ExecutorProc.start",
        _names("self **kwargs"),
        "keeps the worker's process as _proc, which is watched",
    ),
    Seam(
        "H19",
        "lmdeploy.pytorch.paging.scheduler",
        "Scheduler.schedule_metrics",
        None,
        "wrapped: a server asks for it every few seconds",
    ),
    Seam(
        "H19",
        "lmdeploy.pytorch.paging.state_manager",
        "StateManager.get_num_free",
        _names("self"),
        "free state slots",
    ),
    *(
        Seam("H20", module, name, None, "has to be the host's or ours after dlinfer's start-up")
        for module, names in kept.NAMES.items()
        for name in names
        if module == kept.GATED_DELTA or name not in kept.LAYERS
    ),
    Seam(
        "H14",
        f"{ASCEND}.op_backend",
        "AscendOpsBackend.build_graph_runner",
        _names("model model_config cache_config backend_config device"),
        "its runner's model is given our rows",
    ),
    Seam(
        "H14",
        f"{BACKENDS}.graph_runner",
        "GraphRunner.__init__",
        _names("self model model_config cache_config backend_config device **kwargs"),
        "keeps the model and the backend's config under these names",
    ),
    Seam(
        "H14",
        f"{BACKENDS}.graph_runner",
        "GraphRunner.__call__",
        _names("self **kwargs"),
        "wrapped: a capture that is not replayed for its step is an error",
    ),
    Seam(
        "H14",
        MIXIN,
        "CudaGraphMixin.make_buffers_cudagraph",
        _names("self graph_meta input_ids position_ids past_key_values attn_metadata inputs_embeds **kwargs"),
        "wrapped: makes the static rows of a bucket",
    ),
    Seam(
        "H14",
        MIXIN,
        "CudaGraphMixin.fill_buffers_cudagraph",
        _names("self graph_meta input_ids position_ids past_key_values attn_metadata inputs_embeds **kwargs"),
        "wrapped: fills them from the step as it came",
    ),
    Seam("H14", MIXIN, "CudaGraphMeta", _names("max_batchs max_tokens"), "the rows and tokens of a bucket"),
    Seam(
        "H14",
        f"{BACKENDS}.attention",
        "AttentionMetadata",
        _names("q_seqlens kv_seqlens"),
        "the lengths of a step's rows",
    ),
)


@cache
def host_version() -> str | None:
    """Return the installed LMDeploy version without importing it, or None."""
    try:
        return importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def known_hosts() -> dict[str, Any]:
    """Return configs/hosts.json: the host versions tried, and how."""
    text = (files("dlinfer_ext.configs") / "hosts.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def host_root() -> Path:
    """Return the folder that holds the installed `lmdeploy` package.

    Raises:
        HostMismatch: LMDeploy is not installed.
    """
    spec = importlib.util.find_spec("lmdeploy")
    if spec is None or not spec.submodule_search_locations:
        raise HostMismatch("LMDeploy is not installed: see docs/en/install.md for the pinned version")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _source(root: Path, module: str) -> ast.Module | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _find(tree: ast.Module, name: str) -> ast.AST | None:
    node: ast.AST = tree
    for part in name.split("."):
        found = [
            n
            for n in ast.iter_child_nodes(node)
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name == part
        ]
        if not found:
            return None
        node = found[-1]
    return node


def _parameters(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        return tuple(n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    a = node.args
    star = ([f"*{a.vararg.arg}"] if a.vararg else ["*"]) if a.vararg or a.kwonlyargs else []
    names = [x.arg for x in (*a.posonlyargs, *a.args)] + star + [x.arg for x in a.kwonlyargs]
    return (*names, f"**{a.kwarg.arg}") if a.kwarg else tuple(names)


def check(seam: Seam, root: Path) -> str | None:
    """Return why a seam does not fit the LMDeploy below `root`, or None."""
    tree = _source(root, seam.module)
    if tree is None:
        return f"module {seam.module} does not exist"
    node = _find(tree, seam.name)
    if node is None:
        return f"{seam.module} has no {seam.name}"
    if seam.parameters is None:
        return None
    got = _parameters(node)
    if isinstance(node, ast.ClassDef):
        missing = [p for p in seam.parameters if p not in got]
        return f"{seam.module}.{seam.name} lacks the fields {', '.join(missing)}" if missing else None
    if got != seam.parameters:
        return f"{seam.module}.{seam.name} takes ({', '.join(got)}); wanted ({', '.join(seam.parameters)})"
    return None


def mismatches(root: Path | None = None, hooks: tuple[str, ...] | None = None) -> list[tuple[Seam, str]]:
    """Return every seam that does not fit, with why; `hooks` limits the check to some hooks."""
    root = root or host_root()
    results = ((s, check(s, root)) for s in SEAMS if hooks is None or s.hook in hooks)
    return [(s, why) for s, why in results if why is not None]


def require(hooks: tuple[str, ...]) -> None:
    """Raise HostMismatch with every seam of these hooks that does not fit the installed LMDeploy."""
    wrong = mismatches(hooks=hooks)
    if wrong:
        lines = "\n".join(f"  {s.hook} ({s.why}): {why}" for s, why in wrong)
        tried = ", ".join(known_hosts()["lmdeploy"])
        raise HostMismatch(
            f"LMDeploy {host_version()} does not have the seams that dlinfer_ext relies on:\n{lines}\n"
            f"Versions tried: {tried}. Install one of them, or set DLINFER_EXT_AUTOLOAD=0 to run LMDeploy without "
            "dlinfer_ext."
        )
