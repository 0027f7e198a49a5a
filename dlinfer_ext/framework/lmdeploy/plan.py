"""What a model needs of each card under LMDeploy, counted without one.

LMDeploy answers, not a formula of ours: its config builders, this model and its draft layer built on torch's meta
device as one rank builds them, its planner of cache blocks and its executor's division of what is left. Nothing is
allocated and no weight is read; config.json is enough.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .drafts import METHODS, draft_method


@dataclass(frozen=True)
class Question:
    """What is asked for: a config.json (or its folder), and the engine's settings of the same names.

    Attributes:
        drafts: tokens drafted per step by the MTP layer; 0 is none.
        prefix_states: `prefix_cache_state_budget`, slots that keep the states of shared prefixes.
        memory: bytes of one card.
        reserved: bytes of it that are neither weights nor caches: the runtime's, the communication's, other processes'.
    """

    config: Path
    memory: int
    reserved: int
    tp: int = 1
    drafts: int = 0
    batch: int = 256
    dtype: str = "bfloat16"
    block_size: int = 64
    prefix_states: int = 0
    max_prefill_tokens: int = 4096
    cache_max_entry_count: float = 0.8
    language_model_only: bool = False


@dataclass(frozen=True)
class Pool:
    """One state cache: `bytes` is of one request on one card."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int


@dataclass(frozen=True)
class Card:
    """What one card holds, in bytes.

    Attributes:
        weights, draft_weights: parameters and buffers of the model, and of the draft layer where it does not share
            them with the model.
        states: the state caches of one request; `slot` is their sum as allocated.
        slots: requests whose state fits, plus what LMDeploy keeps: one it uses itself and one that is spare.
        block_size: tokens of a block, after LMDeploy's own rules.
        block, draft_block: one block of the paged caches of all layers, of the model and of the draft layer.
        runtime: what LMDeploy keeps for activations and logits.
        max_prefill_tokens: tokens of a prefill step, which LMDeploy halves while too few blocks are left.
        blocks: blocks that fit, one of them reserved by LMDeploy; 0 if it does not start.
        refusal: why LMDeploy does not start, or "".
    """

    weights: int
    draft_weights: int
    states: tuple[Pool, ...]
    slot: int
    slots: int
    block_size: int
    block: int
    draft_block: int
    runtime: int
    max_prefill_tokens: int
    blocks: int
    refusal: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that the paged caches hold, of all requests together."""
        return max(self.blocks - 1, 0) * self.block_size

    def blocks_of(self, session_len: int, drafts: int) -> int:
        """Return the blocks of one request of `session_len` tokens; drafts are written past its end."""
        return -(-(session_len + drafts) // self.block_size)


class PlanError(ValueError):
    """The question cannot be answered: what came, and what is wanted."""


def plan(question: Question) -> Card:
    """Return what each card holds.

    Raises:
        PlanError: no config.json, a model type that is not served, or a config that its builder refuses.
    """
    with _folder(question.config) as folder:
        try:
            method = draft_method(folder)
        except ValueError:
            raise PlanError(
                f"plan: {question.config} is no JSON, or of a model type that is not served; "
                f"wanted a config.json whose model_type is one of {', '.join(METHODS)}"
            ) from None
        try:
            with _quiet():
                return _plan(question, folder, method)
        except (ValueError, RuntimeError) as error:  # the latter: no model for these architectures, or this auto_map
            raise PlanError(f"plan: {error}") from error
        except AssertionError as error:
            # LMDeploy's builders check so, mostly without words.
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise PlanError(
                f"plan: LMDeploy refuses this model with --tp {question.tp}: {str(error) or at.line} ({at.name})"
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep LMDeploy from writing on the standard output what the answer says anyway."""
    import lmdeploy.utils

    logger = lmdeploy.utils.get_logger("lmdeploy")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _folder(config: Path) -> Iterator[Path]:
    """Give a folder with nothing but config.json: a checkpoint's folder may hold code, and gigabytes."""
    source = config / "config.json" if config.is_dir() else config
    if not source.is_file():
        raise PlanError(f"plan: --config {config} is no file and no folder with a config.json; wanted one of them")
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_plan_") as name:
        shutil.copyfile(source, Path(name) / "config.json")
        yield Path(name)


def _plan(question: Question, folder: Path, method: str) -> Card:
    from lmdeploy.messages import PytorchEngineConfig, SpeculativeConfig
    from lmdeploy.pytorch.config import ModelConfig, SpecDecodeConfig
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder

    engine = ConfigBuilder.update_engine_config(
        PytorchEngineConfig(
            device_type="ascend",
            tp=question.tp,
            max_batch_size=question.batch,
            block_size=question.block_size,
            prefix_cache_state_budget=question.prefix_states,
            enable_prefix_caching=bool(question.prefix_states),
            max_prefill_token_num=question.max_prefill_tokens,
            cache_max_entry_count=question.cache_max_entry_count,
            language_model_only=question.language_model_only,
        )
    )
    engine.dtype = question.dtype  # its constructor refuses fp32, which the CPU vendor can serve
    cache = ConfigBuilder.build_cache_config(engine)
    ranks = ConfigBuilder.build_dist_config(engine)
    draft: SpecDecodeConfig | None = None
    if question.drafts:
        asked = SpeculativeConfig(method=method, num_speculative_tokens=question.drafts)
        draft = ConfigBuilder.build_specdecode_config(str(folder), asked, engine, cache, ranks)
    model = ModelConfig.from_pretrained(
        str(folder),
        dtype=question.dtype,
        dist_config=ranks,
        spec_method=method if draft else None,
        num_spec_tokens=question.drafts,
        device_type="ascend",
        block_size=cache.block_size,
    )
    with _one_rank(ranks):
        return _count(question, str(folder), engine, model, cache, ranks, draft)


@contextmanager
def _one_rank(ranks: Any) -> Iterator[None]:
    """Be the first rank of `ranks` without any process group: what is built asks for rank and size only."""
    from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
    from lmdeploy.pytorch.distributed import DistContext, DistGroup, get_dist_manager

    group = DistGroup(rank=0)
    rank = DistContext(
        rank=0,
        tp_group=group,
        attn_tp_group=group,
        mlp_tp_group=group,
        moe_tp_group=group,
        dist_config=ranks,
    )
    with get_dist_manager().context(rank), get_device_manager().context(DeviceContext("ascend")):
        yield


def _bytes(model: Any, beside: Any = None) -> int:
    """Sum parameters and buffers, each once, without those of `beside`."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    if beside is not None:
        for tensor in [*beside.parameters(), *beside.buffers()]:
            held.pop(id(tensor), None)
    return sum(t.nbytes for t in held.values())


def _count(question: Question, folder: str, engine: Any, model_config: Any, cache: Any, ranks: Any, draft: Any) -> Card:
    from lmdeploy.pytorch.engine.cache_engine import StateCacheEngine
    from lmdeploy.pytorch.engine.cache_engine.collector import collect_block_cache_requests
    from lmdeploy.pytorch.engine.cache_engine.plan import build_block_cache_plan
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase, _WorkerCachePlanSizes
    from lmdeploy.pytorch.models.patch import BuildModelContext, build_patched_model
    from lmdeploy.pytorch.spec_decode.proposers.base import build_specdecode_proposer

    meta = torch.device("meta")
    context = BuildModelContext(
        language_model_only=engine.language_model_only,
        quant_config=model_config.quant_config,
        tie_word_embeddings=model_config.tie_word_embeddings,
        num_spec_tokens=question.drafts,
        max_batch_size=cache.max_batches,
    )
    model = build_patched_model(model_config, device=meta, build_model_ctx=context)
    weights, draft_weights, draft_model = _bytes(model), 0, None
    if draft is not None:
        proposer = build_specdecode_proposer(draft, device=meta)
        proposer.build_model(True, target_model=model, build_model_ctx=context)
        draft_model = proposer.model
        draft_weights = _bytes(draft_model, beside=model)

    class Planner(ExecutorBase):  # type: ignore[misc]
        """LMDeploy's executor where it asks its workers; what it decides is its own."""

        sizes = _WorkerCachePlanSizes(0)
        runtime = 0

        def gather_free_mem(self) -> list[int]:
            return [question.memory - question.reserved - weights - draft_weights]

        def _prepare_worker_cache_plans(self, cache_config: Any, spec_cache_config: Any = None) -> list[Any]:
            def block(config: Any, blocks: Any, module: Any) -> int:
                collect = partial(collect_block_cache_requests, module)
                return int(build_block_cache_plan(config, blocks, ranks.attn_tp, collect).logical_block_nbytes)

            spec = block(draft.model_config, spec_cache_config, draft_model) if spec_cache_config else 0
            self.sizes = _WorkerCachePlanSizes(block(model_config, cache_config, model), spec)
            return [self.sizes]

        def _get_runtime_size(self, *args: Any) -> tuple[int, int]:
            self.runtime, tokens = super()._get_runtime_size(*args)
            return self.runtime, tokens

        def set_cache_config(self, *_: Any) -> None: ...

        def set_model_config(self, *_: Any) -> None: ...

    planner = Planner(
        folder,
        model_config,
        cache,
        ConfigBuilder.build_backend_config(engine),
        ranks,
        ConfigBuilder.build_misc_config(engine),
        specdecode_config=draft,
        device_type="ascend",
    )
    refusal = ""
    try:
        planner.update_configs()
    except (RuntimeError, AssertionError) as error:
        refusal = str(error)
    shapes, specs = model_config.states_shapes, model_config.state_cache_specs
    return Card(
        weights=weights,
        draft_weights=draft_weights,
        states=tuple(_pools(shapes, specs)),
        slot=StateCacheEngine.get_state_slot_nbytes(shapes, state_specs=specs) if shapes else 0,
        slots=question.batch + 2 + question.prefix_states,
        block_size=cache.block_size,
        block=planner.sizes.target,
        draft_block=planner.sizes.spec,
        runtime=planner.runtime,
        max_prefill_tokens=cache.max_prefill_token_num,
        blocks=0 if refusal else cache.num_gpu_blocks,
        refusal=refusal,
    )


def _pools(shapes: Any, specs: Any) -> Iterator[Pool]:
    """Name the state caches; Qwen3.5's, which LMDeploy shapes, have all layers in front and no name."""
    for i, (shape, dtype) in enumerate(shapes):
        size, name = torch.Size(shape).numel() * dtype.itemsize, str(dtype).removeprefix("torch.")
        if specs:
            layers = len(specs[i].layer_ids)
            yield Pool(specs[i].name, tuple(shape), name, layers, size * layers)
        else:
            yield Pool(("convolution", "recurrent")[i], tuple(shape[1:]), name, shape[0], size)
