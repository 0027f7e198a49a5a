"""A dumped call made anew by its definition (`reference.py`, in fp64), and what the call gave held against that."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..ops._access import Row
from ..testing import TOLERANCE
from .state_file import Dump
from .state_values import Finding, about, held_by, indices_and_positions, live_rows, values_of

# A single entry has less to average over than the tensors that the tolerances are of.
_MARGIN: Final = 4.0
_KEY_SCORES: Final = 1e-4  # of the largest score: keys closer than this may be chosen either way

# operator: (module of its definition, the function's name, family of its tolerance)
DEFINITIONS: Final = {
    "causal_conv1d": ("causal_conv1d", "causal_conv1d", "conv"),
    "causal_conv1d_columns": ("causal_conv1d", "causal_conv1d_columns", "conv"),
    "causal_conv1d_update": ("causal_conv1d", "causal_conv1d_update", "conv"),
    "gated_delta_rule": ("gated_delta_rule", "gated_delta_rule", "delta_rule"),
    "gated_delta_rule_update": ("gated_delta_rule", "gated_delta_rule_update", "delta_rule"),
    "sigmoid_gating_delta_rule_update": ("gated_delta_rule", "sigmoid_gating_delta_rule_update", "delta_rule"),
    "kda": ("kda", "kda", "kda"),
    "kda_update": ("kda", "kda_update", "kda"),
    "kpool_update": ("kpool_indexer", "kpool_update", "kpool"),
    "kpool_select": ("kpool_indexer", "kpool_select", "kpool"),
    "latent_write": ("latent_attention", "latent_write", "latent"),
    "latent_attention": ("latent_attention", "latent_attention", "latent"),
}
_NOT_IN_DEFINITIONS: Final = ("host_lengths", "max_query_len")


def against_the_definition(dump: Dump) -> Iterator[Finding]:
    if dump.missing or dump.header["left_out"]:
        what = ", ".join(dump.missing) or "slots"
        yield Finding(None, f"not held against the definition: {what} not kept, being large", fault=False)
        return
    if any(p.row is None or p.argument in ("cu_seqlens", "query_start_loc") for p in dump.plan.problems):
        return
    want_out, want_pools = define(dump)
    limit = _limit(dump)
    for row in live_rows(dump):
        found: list[Finding] = []
        for name, entries in row.writes.items():
            if name == "conv_state":
                continue  # exact, and named more closely above
            for index, position, value in values_of(dump, "after", name, entries):
                at = (dump.slots(name)[index[0]], *index[1:])
                if not _close(value, want_pools[name][at], want_pools[name], limit):
                    held = _which(dump, name, value, want_pools[name], limit)
                    found.append(
                        about(row.number, "after", name, index, f"does not hold {held_by(row, name, position)}{held}")
                    )
        if want_out is not None and "out" in dump.tensors:
            found += [Finding(row.number, text) for text in _outputs(dump, row, want_out, limit)]
        if found and _begins(dump, row) and _goes_on_from_stale(dump, row, limit):
            text = f"its result is that of reading what its slot held before the first of its {row.history} tokens"
            found.append(Finding(row.number, text))
        yield from found
    yield from _tokens_of_no_row(dump)


def define(dump: Dump, histories: Mapping[int, int] | None = None) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Make a call anew by its definition.

    Args:
        dump: with all its inputs and slots.
        histories: of rows that are taken to have another history.

    Returns:
        (the output, packed; the kept slots of each pool after the call, in fp64, of the convolution in its own dtype).
    """
    module, name, _ = DEFINITIONS[dump.plan.operator]
    arguments = {n: v for n, v in dump.arguments.items() if n not in _NOT_IN_DEFINITIONS}
    arguments = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    pools = {}
    for pool in dump.pools:
        before = dump.tensors[f"before.{pool}"]
        pools[pool] = before.clone() if pool == "conv_state" else before.double()
    arguments |= pools
    arguments |= _rows_of(dump, histories or {})
    out = getattr(importlib.import_module(f"dlinfer_ext.kernels.{module}.reference"), name)(**arguments)
    if isinstance(out, Tensor) and dump.kind.packed(dump.kind.inputs[0], dump.arguments).shape[0] != out.shape[0]:
        out = out.flatten(0, 1)
    return out, pools


def _rows_of(dump: Dump, histories: Mapping[int, int]) -> dict[str, Any]:
    """Return the arguments that tell the rows, for slots numbered as in the file; rows that are not live are PAD."""
    where = dump.slots(dump.pools[0])
    live = {row.number for row in live_rows(dump)}
    given: dict[str, Any] = {}
    for name in ("history_lens", "cache_seqlens"):
        value = dump.arguments.get(name)
        if value is not None:
            given[name] = torch.tensor([histories.get(i, n) for i, n in enumerate(value.tolist())], dtype=torch.int64)
    if "block_offsets" in dump.arguments:
        table = dump.arguments["block_offsets"]
        given["block_offsets"] = torch.tensor([[where.get(b, 0) for b in row] for row in table.tolist()]).view(
            table.shape
        )
        lens = dump.arguments["history_lens"].tolist()
        given["history_lens"] = torch.tensor([n if i in live else -1 for i, n in enumerate(lens)], dtype=torch.int64)
        return given
    name = "conv_state_indices" if "conv_state_indices" in dump.arguments else "state_indices"
    slots = dump.arguments[name]
    rows = (
        [[row.number] for row in dump.plan.rows] if slots is None else slots.reshape(len(dump.plan.rows), -1).tolist()
    )
    mapped = [[where.get(slot, -1) if i in live else -1 for slot in row] for i, row in enumerate(rows)]
    shape = (len(rows),) if slots is None else slots.shape
    return given | {name: torch.tensor(mapped, dtype=torch.int64).view(shape), "pad_slot_id": -1}


def _outputs(dump: Dump, row: Row, want: Tensor, limit: float) -> Iterator[str]:
    part = slice(row.tokens.start, row.tokens.stop)
    got = _packed_out(dump)[part]
    if dump.plan.operator == "kpool_select":
        yield from (
            f"token {t} attends to {sorted(set(g) - set(w))} and not to {sorted(set(w) - set(g))}"
            for t, (g, w) in enumerate(zip(got.tolist(), want[part].tolist(), strict=True))
            if g != w and not _as_good(dump, row, t, g, w)
        )
        return
    for t, (g, w) in enumerate(zip(got, want[part], strict=True)):
        if not _close(g, w, want[part], limit):
            yield f"the output of its token {t} is not that of the definition"
            return


def _as_good(dump: Dump, row: Row, token: int, got: list[int], want: list[int]) -> bool:
    """Tell whether another choice of keys is as good but for rounding: of a legal form, with scores as high.

    Of equal scores the earlier key pool is to be taken.
    """
    from ..kernels.kpool_indexer.reference import pool_scores

    kpool, complete = dump.arguments["kpool"], ((row.history or 0) + token + 1) // dump.arguments["kpool"]
    held = [p for p in want if p >= 0]
    pools, other = ({p // kpool for p in chosen if 0 <= p < complete * kpool} for chosen in (held, got))
    same_form = sorted(p for p in got if p >= 0) == [p for p in got if p >= 0]
    rest = [[p for p in chosen if p >= complete * kpool] for chosen in (got, held)]
    if not same_form or rest[0] != rest[1] or len(got) != len(want) or len(other) != len(pools):
        return False
    keys = torch.stack([value for _, _, value in values_of(dump, "before", "pool_cache", row.reads["pool_cache"])])
    at = row.tokens.start + token
    scores = pool_scores(dump.arguments["q"][at], dump.arguments["weights"][at], keys[:complete])
    near = _KEY_SCORES * max(map(abs, scores))
    return all(
        scores[taken] != scores[left] and scores[left] - scores[taken] <= near
        for taken in other - pools
        for left in pools - other
    )


def _tokens_of_no_row(dump: Dump) -> Iterator[Finding]:
    """Check that tokens of PAD rows and of no row give nothing."""
    if "out" not in dump.tensors:
        return
    out = _packed_out(dump)
    live = torch.zeros(len(out), dtype=torch.bool)
    for row in live_rows(dump):
        live[row.tokens.start : row.tokens.stop] = True
    nothing = -1 if dump.plan.operator == "kpool_select" else 0
    bad = (out != nothing).flatten(1).any(1) & ~live
    if bool(bad.any()):
        token = int(bad.int().argmax())
        number = next((row.number for row in dump.plan.rows if token in row.tokens), None)
        yield Finding(number, f"packed token {token} is of no live row, and its output is not {nothing}")


def _begins(dump: Dump, row: Row) -> bool:
    """Tell whether a row reads nothing, or of a window only a part."""
    window = dump.arguments["weight"].shape[0] - 1 if dump.pools == ["conv_state"] else 1
    return row.history is not None and row.history < window


def _goes_on_from_stale(dump: Dump, row: Row, limit: float) -> bool:
    """Tell whether a row that begins gave what it would give with more of a history."""
    period = dump.arguments[dump.pools[0]].shape[1] if dump.plan.layout == "ring" else 1
    # A multiple of the ring, so that the places stay the same, and more than a window is long.
    out, pools = define(dump, {row.number: (row.history or 0) + period * 8})
    same = []
    for name, entries in row.writes.items():
        for index, _, value in values_of(dump, "after", name, entries):
            want = pools[name][(dump.slots(name)[index[0]], *index[1:])]
            same.append(_close(value, want, want, limit))
    if out is not None and "out" in dump.tensors:
        part = slice(row.tokens.start, row.tokens.stop)
        got, want = _packed_out(dump)[part], out[part]
        same.append(_close(got, want, want, limit))
    return bool(same) and all(same)


def _which(dump: Dump, name: str, value: Tensor, pool: Tensor, limit: float) -> str:
    """Say which state an entry holds instead, if it is one of those that the call should have written or had read."""
    for row in live_rows(dump):
        for index, position in zip(*(t.tolist() for t in indices_and_positions(row.writes.get(name))), strict=True):
            if _close(value, pool[(dump.slots(name)[index[0]], *index[1:])], pool, limit):
                return f", but {held_by(row, name, position)} of row {row.number}"
        for _, position, old in values_of(dump, "before", name, row.reads.get(name)):
            if _close(value, old, old, limit):
                return f", but {held_by(row, name, position)} of row {row.number}"
    if value.dim() > 1 and value.shape[-1] == value.shape[-2]:
        for row in live_rows(dump):
            for index in indices_and_positions(row.writes.get(name))[0].tolist():
                if _close(value.transpose(-1, -2), pool[(dump.slots(name)[index[0]], *index[1:])], pool, limit):
                    return ", but one transposed"
    return ""


def _limit(dump: Dump) -> float:
    family = DEFINITIONS[dump.plan.operator][2]
    tensors = [dump.arguments[n] for n in (*dump.kind.inputs, *dump.pools)]
    return _MARGIN * max(TOLERANCE[family, t.dtype] for t in tensors if (family, t.dtype) in TOLERANCE)


def _close(got: Tensor, want: Tensor, all_of_it: Tensor, limit: float) -> bool:
    """Compare by RMS over that of the wanted values; a small one among large ones is held to a hundredth of theirs.

    What is not finite has to be the same: a row that was given NaN gives NaN.
    """
    g, w, whole = got.double(), want.double(), all_of_it.double()
    same = (g == w) | (g.isnan() & w.isnan())
    if bool(same.all()):
        return True
    scale = max(_rms(w), 0.01 * _rms(whole))
    return _rms(torch.where(same, 0.0, g - w), finite=False) <= limit * scale


def _rms(t: Tensor, *, finite: bool = True) -> float:
    values = t[t.isfinite()] if finite else t
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _packed_out(dump: Dump) -> Tensor:
    out = dump.tensors["out"]
    tokens = dump.kind.packed(dump.kind.inputs[0], dump.arguments).shape[0]
    return out if out.shape[0] == tokens else out.flatten(0, 1)
