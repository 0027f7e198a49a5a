"""What LMDeploy 0.18 and this package need of dlinfer, as data, and the check of a dlinfer's sources against it.

Only what Qwen3.5, Qwen3-Next and GLM-5.3-Flash reach is listed; quantised weights and LMDeploy's own sparse attention
need more. tests/cli/test_env_dlinfer.py holds the calls to those in LMDeploy's sources.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..framework.lmdeploy import contract, patches
from .sources import Call, Found, Tree, Unreadable, absolute, bound, signature, statements

OPS: Final = "dlinfer.ops"
EXTENSION: Final = "dlinfer.framework.lmdeploy_ext"
GRAPHS: Final = f"{EXTENSION}.cudagraph.ascend_cudagraph"
ASCEND: Final = "dlinfer.vendor.ascend"
# What is not loaded on Ascend: other vendors' modules, and those of a graph mode that LMDeploy 0.18 does not have.
NOT_LOADED: Final = ("camb", "maca", "ppu", "dynamo")
QUANTISED: Final = "quants"  # a folder for weights that the models of this package do not have
# Hooks that hold whatever dlinfer puts there: applied again after it (H2, H5), wrapped around what is found (H14).
ROBUST: Final = ("H2", "H5", "H14")
# What is put back after it.
KEPT: Final = "H20"
# What serves gated delta models and is expected to be LMDeploy's own.
STANDS_ON: Final = (
    "lmdeploy.pytorch.engine.cache_engine.StateCacheEngine.allocate_caches",
    "lmdeploy.pytorch.engine.cache_engine.StateCacheEngine.init_caches",
)


@dataclass(frozen=True)
class Need:
    """One thing of dlinfer's.

    Attributes:
        module: dotted module name.
        call: how it is called (sources.Call), a bare name where existence is enough, or "" for the module itself.
        who: who needs it, and for what.
    """

    module: str
    call: str
    who: str

    @property
    def name(self) -> str:
        return self.call.partition("(")[0]


NEEDS: Final = (
    Need(EXTENSION, "", "LMDeploy imports it in every process"),
    Need(f"{EXTENSION}.device", "", "LMDeploy's Ascend backend imports it as it starts"),
    Need(f"{ASCEND}.version", "ensure_ascend_runtime()", "LMDeploy's Ascend backend calls it as it starts"),
    Need(
        f"{ASCEND}.triton_ops.triton_utils",
        "init_device_properties_triton()",
        "LMDeploy's Ascend backend calls it as it starts",
    ),
    Need(
        GRAPHS,
        "AscendGraphRunner(model, model_config, cache_config, backend_config, device, is_mla=_)",
        "LMDeploy's Ascend backend makes one for every model",
    ),
    Need(GRAPHS, "get_ascend_compatible_size(n)", "LMDeploy pads a batch with experts in parallel to it"),
    Need("dlinfer.vendor", "vendor_name", "LMDeploy asks it in every layer of experts"),
    Need(f"{ASCEND}.moe", "build_chunked_moe_storage_layout(num_experts)", "layers of experts"),
    Need(f"{ASCEND}.moe", "chunked_moe_storage_expert_id(expert_id, chunked_moe_layout)", "layers of experts"),
    Need(
        f"{ASCEND}.moe",
        "zero_chunked_moe_weight_padding(gate_up_weights, down_weights, chunked_moe_layout)",
        "layers of experts",
    ),
    Need("dlinfer.utils.type_annotation", "MoECommType", "LMDeploy's layers of experts"),
    Need(
        "dlinfer.utils.type_annotation",
        "MoeMetadata(max_tokens_across_dp=_, pad_size=_, dp_size=_, tp_size=_, ep_size=_, tp_rank=_, ep_rank=_, "
        "tp_group=_, ep_group=_, moe_comm_type=_, x_active_mask=_, moe_group_name=_)",
        "LMDeploy's Ascend backend makes one for every step",
    ),
    *(
        Need(OPS, call, "operator that LMDeploy's wrappers call")
        for call in (
            "rms_norm(hidden_states, weight, epsilon)",
            "add_rms_norm(hidden_states, residual, weight, epsilon)",
            "silu_and_mul(input_tensor)",
            "linear(x, weight, bias=_, all_reduce=_, group=_)",
            "apply_rotary_pos_emb(query, key, cos, sin)",
            "fill_kv_cache(key, value, key_cache, value_cache, kv_indices | kv_start_indices, k_scales_zeros=_, "
            "v_scales_zeros=_, quant_bits=_)",
            "prefill_attention(query, key, value, key_cache, value_cache, q_seqlens | q_seq_len, "
            "kv_seqlens | kv_seq_len, max_q_seq_len, num_q_heads, num_kv_heads, attn_mask, softmax_scale=_, "
            "attn_output=_, actual_seq_lengths_cpu=_)",
            "paged_prefill_attention(query, key, value, key_cache, value_cache, block_table, block_size, "
            "actual_q_seqlens_cpu, kv_seqlens_cpu, max_q_seq_len, max_kv_seq_len, num_q_heads, num_kv_heads, "
            "attn_mask, head_size_v=_, softmax_scale=_, attn_output=_, kv_scales=_, kv_zeros=_, quant_bits=_)",
            "paged_decode_attention(query, key_cache, value_cache, block_table, block_size, actual_q_seqlens_cpu, "
            "kv_seqlens_cpu, max_kv_seq_len, num_q_heads, num_kv_heads, head_size_v=_, softmax_scale=_, "
            "attn_output=_, kv_scales=_, kv_zeros=_, quant_bits=_)",
            "moe_gating_topk_softmax(router_logits, topk, moe_metadata)",
            "fused_moe(hidden_states, gate_up_weights, down_weights, topk_weights, topk_ids, topk, renormalize, "
            "moe_metadata, chunked_moe_layout)",
        )
    ),
)

Kind = Literal["call", "renamed", "registration", "import", "replacement"]


@dataclass(frozen=True)
class Difference:
    """One thing of a dlinfer that does not fit.

    Attributes:
        kind: "call": something is missing or cannot be called as it is called; "renamed": an argument has another
            name where it is given by place, so its meaning may differ; "registration": an operator without its Ascend
            implementation; "import": dlinfer asks LMDeploy for a name it does not have; "replacement": dlinfer puts
            something of its own into LMDeploy that this package or LMDeploy cannot work with.
        name: the dotted name.
        where: "file:line" below the folder that was checked, or the module that is not there.
        why: what was found, what is wanted, and who needs it.
        fault: whether it breaks serving; otherwise it is to be looked at.
    """

    kind: Kind
    name: str
    where: str
    why: str
    fault: bool = True


def open_tree(path: Path) -> Tree:
    """Return the sources of dlinfer at or below a folder: a checkout, site-packages, or the package itself.

    Raises:
        FileNotFoundError: no dlinfer there.
    """
    for root in (path, path / "src", path.parent if path.name == "dlinfer" else path):
        if (root / "dlinfer" / "__init__.py").is_file():
            return Tree(root.resolve())
    raise FileNotFoundError(
        f"{path} holds no dlinfer: wanted a checkout, a site-packages or an unpacked wheel with dlinfer/__init__.py"
    )


def version(tree: Tree) -> str | None:
    """Return the version that dlinfer's sources state, or None."""
    text = (tree.root / "dlinfer" / "__init__.py").read_text(encoding="utf-8")
    stated = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
    return stated.group(1) if stated else None


def differences(tree: Tree, host: Tree | None = None) -> list[Difference]:
    """Return everything of a dlinfer that does not fit.

    Args:
        tree: dlinfer's sources.
        host: LMDeploy's, for the names that dlinfer imports and replaces; None leaves those out.
    """
    found: list[Difference] = []
    for need in NEEDS:
        try:
            found += _need(tree, need)
        except Unreadable as error:
            found.append(_unreadable(f"{need.module}.{need.name}".rstrip("."), error))
    if host is not None:
        found += _extension(tree, host)
    unique = {(d.name, d.where, d.why): d for d in found}
    return list(unique.values())


def _unreadable(name: str, error: Unreadable) -> Difference:
    where, _, why = str(error).partition(": ")
    return Difference("call", name, where, why)


def _need(tree: Tree, need: Need) -> Iterator[Difference]:
    full = f"{need.module}.{need.name}".rstrip(".")
    if not need.call:
        if tree.file(need.module) is None:
            yield Difference("call", full, need.module, f"this module does not exist ({need.who})")
        return
    if tree.file(need.module) is None:
        yield Difference("call", full, need.module, f"this module does not exist ({need.who})")
        return
    found = tree.find(need.module, need.name)
    if found is None:
        file = tree.file(need.module)
        assert file is not None
        yield Difference("call", full, tree.place(file, 1), f"there is no {need.name} ({need.who})")
        return
    if "(" not in need.call:
        return
    takes = signature(found.node, _decorated_defaults(found))
    if takes is not None:
        wrong, renamed = Call.of(need.call).misfits(takes)
        if wrong or renamed:
            why = "; ".join([*wrong, *renamed[:1], *([f"{len(renamed) - 1} more behind it"] if renamed[1:] else [])])
            kind: Kind = "call" if wrong else "renamed"
            yield Difference(kind, full, tree.place(found.file, found.line), f"{why} ({need.who})", bool(wrong))
    if need.module == OPS:
        yield from _registration(tree, need.name, found)


def _decorated_defaults(found: Found) -> frozenset[str]:
    """Return the parameters that `@register_custom_op(..., default_value={...})` gives a default."""
    names: set[str] = set()
    for decorator in getattr(found.node, "decorator_list", []):
        for keyword in getattr(decorator, "keywords", []):
            if keyword.arg == "default_value" and isinstance(keyword.value, ast.Dict):
                names |= {str(k.value) for k in keyword.value.keys if isinstance(k, ast.Constant)}
    return frozenset(names)


def _registration(tree: Tree, operator: str, found: Found) -> Iterator[Difference]:
    """Check that an operator's Ascend implementation is registered and takes what the operator hands on."""
    handed_on = [
        node
        for node in ast.walk(found.node)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "vendor_ops_registry"
        and isinstance(node.func.slice, ast.Constant)
    ]
    for call in handed_on:
        name = str(call.func.slice.value)  # type: ignore[attr-defined]
        implementations = list(_registered(tree, name))
        if not implementations:
            yield Difference(
                "registration",
                f"{OPS}.{operator}",
                tree.place(found.file, call.lineno),
                f"no module of {ASCEND} registers {name!r} with @register_ops",
            )
        for implementation in implementations:
            takes = signature(implementation.node)
            keywords = frozenset(k.arg for k in call.keywords if k.arg)
            wrong, _ = Call(name, (frozenset(),) * len(call.args), keywords).misfits(takes) if takes else ([], [])
            if wrong:
                yield Difference(
                    "registration",
                    f"{ASCEND} {name}",
                    tree.place(implementation.file, implementation.line),
                    f"{'; '.join(wrong)} ({OPS}.{operator} hands on {len(call.args)} arguments)",
                )


def _registered(tree: Tree, name: str) -> Iterator[Found]:
    folder = tree.root.joinpath(*ASCEND.split("."))
    for file in sorted(folder.glob("*.py")):
        for node in statements(tree.parse(file).body):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
                if any(isinstance(d, ast.Name) and d.id == "register_ops" for d in decorators):
                    yield Found(node, file)


def _extension(tree: Tree, host: Tree) -> Iterator[Difference]:
    """Check what dlinfer's LMDeploy extension takes from LMDeploy, and what it replaces there."""
    folder = tree.root.joinpath(*EXTENSION.split("."))
    for file in sorted(folder.rglob("*.py")):
        if any(word in file.relative_to(folder).as_posix() for word in NOT_LOADED):
            continue
        try:
            module = tree.parse(file)
        except Unreadable as error:
            yield _unreadable(EXTENSION, error)
            continue
        functions = [n for n in ast.walk(module) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        outer = _imports(module.body)
        guards = dict(_guards(module.body))
        scopes = [(module.body, outer), *((f.body, outer | _imports(f.body)) for f in functions)]
        for body, names in scopes:
            for node in statements(body):
                guard = guards.get(id(node), "")
                yield from _asked(tree, host, file, node, guard)
                yield from _replaced(tree, host, file, node, names, guard)


def _guards(body: list[ast.stmt], test: str = "") -> Iterator[tuple[int, str]]:
    """Yield the id of every statement below a body that stands under a condition, with the innermost condition."""
    for node in body:
        if test:
            yield id(node), test
        for name in ("body", "orelse", "finalbody"):
            inner = ast.unparse(node.test) if isinstance(node, ast.If) and name == "body" else test
            yield from _guards([n for n in getattr(node, name, []) if isinstance(n, ast.stmt)], inner)


def _imports(body: list[ast.stmt]) -> dict[str, str]:
    """Return the local names that a body imports from LMDeploy, with their dotted names."""
    names: dict[str, str] = {}
    for node in statements(body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lmdeploy":
            source = absolute(node, "", is_package=False)
            names |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("lmdeploy.")}
    return names


def _asked(tree: Tree, host: Tree, file: Path, node: ast.stmt, guard: str) -> Iterator[Difference]:
    if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "lmdeploy":
        return
    source, where = node.module or "", tree.place(file, node.lineno)
    only = f", where {guard}" if guard else ""
    if not host.has(source):
        yield Difference("import", source, where, f"LMDeploy has no such module, so this import fails{only}", not guard)
        return
    for alias in node.names:
        if alias.name != "*" and not _exists(host, source, alias.name):
            yield Difference(
                "import",
                f"{source}.{alias.name}",
                where,
                f"LMDeploy has no such name: this import fails, and what dlinfer sets behind it is not set{only}",
                not guard,
            )


def _exists(host: Tree, module: str, name: str) -> bool:
    try:
        return host.find(module, name) is not None or host.has(f"{module}.{name}")
    except Unreadable:
        return True  # not dlinfer's fault


def _replaced(
    tree: Tree, host: Tree, file: Path, node: ast.stmt, names: dict[str, str], guard: str
) -> Iterator[Difference]:
    if not isinstance(node, ast.Assign) or guard:
        return
    for target in node.targets:
        dotted = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
        first, _, rest = dotted.partition(".")
        if first not in names or not rest:
            continue
        full = f"{names[first]}.{rest}"
        module, name = _split(host, full)
        try:
            original = host.find(module, name)
        except Unreadable:
            continue
        where = tree.place(file, node.lineno)
        if original is None:
            yield Difference("replacement", full, where, "LMDeploy has no such name, so this does nothing", False)
            continue
        hooks = _hooks(host, module, name, original)
        if KEPT in hooks:
            yield Difference("replacement", full, where, f"hook {KEPT} of this package puts it back", False)
            continue
        why = [*_on_ours(full, hooks), *_other_signature(tree, file, node, original)]
        if why:
            quantised = QUANTISED in file.parts
            note = " (quantised weights only)" if quantised else ""
            yield Difference("replacement", full, where, "; ".join(why) + note, not quantised)


def _hooks(host: Tree, module: str, name: str, original: Found) -> set[str]:
    """Return the hooks, of those that a card has, whose seams a name of LMDeploy is."""
    places = {(module, name), (_module(host, original.file), name)}
    on_a_card = {p.hook for p in patches.PATCHES if "ascend" in p.vendors}
    cpu_only = {p.hook for p in patches.PATCHES} - on_a_card
    return {s.hook for s in contract.SEAMS if (s.module, s.name) in places} - cpu_only


def _on_ours(full: str, hooks: set[str]) -> Iterator[str]:
    """Say that a replacement takes the place of something this package stands on."""
    hooks = hooks - set(ROBUST)
    if hooks:
        yield f"dlinfer's replaces the one that hook {', '.join(sorted(hooks))} of this package has wrapped"
    if full in STANDS_ON:
        yield "this package works with LMDeploy's own"


def _other_signature(tree: Tree, file: Path, node: ast.Assign, original: Found) -> Iterator[str]:
    """Say that a replacement takes other arguments than what LMDeploy calls."""
    if not isinstance(node.value, ast.Name):
        return
    local = [n for n in ast.walk(tree.parse(file)) if node.value.id in bound(n)]
    takes, wanted = signature(local[-1]) if local else None, signature(original.node)
    if takes is None or wanted is None or list(takes.parameters) == list(wanted.parameters):
        return
    kinds = {p.kind for p in takes.parameters.values()}
    if (
        isinstance(original.node, ast.ClassDef)
        or {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    ):
        return  # who makes an object of a class is not looked at; *args and **kwargs take whatever comes
    yield f"dlinfer's takes ({', '.join(takes.parameters)}); LMDeploy's takes ({', '.join(wanted.parameters)})"


def _split(host: Tree, full: str) -> tuple[str, str]:
    """Part a dotted name into the longest module and the name in it."""
    parts = full.split(".")
    for at in range(len(parts) - 1, 0, -1):
        if host.file(".".join(parts[:at])) is not None:
            return ".".join(parts[:at]), ".".join(parts[at:])
    return full, ""


def _module(host: Tree, file: Path) -> str:
    relative = file.relative_to(host.root).with_suffix("")
    return ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)
