"""The definition of the depthwise causal convolution with a per-request state: a loop over requests and tokens.

out[t] = act(bias + sum_i weight[i] · full[t + i]); full is the request's last W - 1 inputs followed by its new ones
(the operator of https://github.com/Dao-AILab/causal-conv1d). Everything is computed in fp64. The forms differ only in
where a request's history lies in its pool row and where the new inputs go; the batched forms are in `eager`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _convolve(full: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return the [q, D] outputs of a row's [W - 1 + q, D] inputs, in fp64."""
    width = weight.shape[0]
    taps = [(full[t : t + width].double() * weight.double()).sum(0) for t in range(full.shape[0] - width + 1)]
    out = torch.stack(taps) + (0 if bias is None else bias.double())
    return out if activation is None else out * torch.sigmoid(out)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor | None,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    layout: str = "linear",
    activation: str | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Convolve a packed batch; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d` for the arguments."""
    width, out = weight.shape[0], torch.zeros_like(x)
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = row if state_indices is None else int(state_indices[row])
        before = 0 if history_lens is None else int(history_lens[row])
        if end == start or slot < 0 or slot == pad_slot_id or before < 0:
            continue
        history = x.new_zeros(width - 1, x.shape[1], dtype=torch.float64)
        if conv_state is not None and before > 0:
            for i in range(width - 1):
                position = before - (width - 1) + i
                if layout == "linear":
                    history[i] = conv_state[slot, i]
                elif position >= 0:
                    history[i] = conv_state[slot, position % conv_state.shape[1]]
        full = torch.cat([history, x[start:end].double()])
        out[start:end] = _convolve(full, weight, bias, activation).to(x.dtype)
        if conv_state is None:
            continue
        if layout == "linear":
            conv_state[slot, : width - 1] = full[end - start :].to(conv_state.dtype)
        else:
            for t in range(max(start, end - conv_state.shape[1]), end):
                conv_state[slot, (before + t - start) % conv_state.shape[1]] = x[t].to(conv_state.dtype)
    return out


def causal_conv1d_columns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    has_history: Tensor | None,
    read_columns: Tensor,
    write_columns: Tensor,
    activation: str | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Convolve with the columns of each row's history [N, W - 1] and of its last W inputs [N, W] given; < 0 is none."""
    width, out = weight.shape[0], torch.zeros_like(x)
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = row if state_indices is None else int(state_indices[row])
        if end == start or slot < 0 or slot == pad_slot_id:
            continue
        history = x.new_zeros(width - 1, x.shape[1], dtype=torch.float64)
        if has_history is not None and bool(has_history[row]):
            for i, column in enumerate(read_columns[row].tolist()):
                if column >= 0:
                    history[i] = conv_state[slot, column]
        full = torch.cat([history, x[start:end].double()])
        out[start:end] = _convolve(full, weight, bias, activation).to(x.dtype)
        for value, column in zip(full[-width:], write_columns[row].tolist(), strict=True):
            if column >= 0:
                conv_state[slot, column] = value.to(conv_state.dtype)
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Advance every row by its new tokens; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_update`."""
    width, length = weight.shape[0], conv_state.shape[1]
    out = torch.zeros_like(x)
    if query_start_loc is None:
        rows = [(x[n].reshape(-1, x.shape[-1]), out[n].view(-1, x.shape[-1])) for n in range(x.shape[0])]
    else:
        spans = pairwise(query_start_loc.tolist())
        rows = [(x[start:end], out[start:end]) for start, end in spans]
    for row, (new, out_row) in enumerate(rows):
        source = target = row
        if conv_state_indices is not None:
            blocks = conv_state_indices[row].reshape(-1).tolist()
            source = blocks[0 if initial_state_idx is None else int(initial_state_idx[row])]
            target = blocks[0 if block_idx_last_scheduled_token is None else int(block_idx_last_scheduled_token[row])]
        before = 0 if cache_seqlens is None else int(cache_seqlens[row])
        if len(new) == 0 or before < 0 or min(source, target) < 0 or pad_slot_id in (source, target):
            continue
        if cache_seqlens is not None:
            read: list[int | None] = [p % length if p >= 0 else None for p in range(before - width + 1, before)]
        else:
            first = 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[row]), 1) - 1
            read = list(range(first, first + width - 1))
        zero = torch.zeros_like(new[0], dtype=torch.float64)
        full = torch.stack([zero if c is None else conv_state[source, c].double() for c in read] + list(new.double()))
        out_row[:] = _convolve(full, weight, bias, activation).to(x.dtype)
        if cache_seqlens is not None:
            # A block that starts to be written needs the history as well: the next step reads it there.
            for i in range(max(0 if source != target else width - 1, len(full) - length), len(full)):
                if before - (width - 1) + i >= 0:
                    conv_state[target, (before - (width - 1) + i) % length] = full[i].to(conv_state.dtype)
        else:
            kept = full[len(new) :] if num_accepted_tokens is None else full[1:]
            conv_state[target, : len(kept)] = kept.to(conv_state.dtype)
    return out
