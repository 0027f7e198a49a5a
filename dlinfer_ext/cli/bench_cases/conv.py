"""Causal convolution: ring prefill as the engine calls it, and verify steps, against `F.conv1d` over each request."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer_ext.ops.causal_conv1d import causal_conv1d_update
from dlinfer_ext.vendor.ascend.triton_ops import causal_conv1d_fn

from . import Case, peak_bytes, public

WIDTH = 4
COLUMNS = WIDTH + 2  # two drafts
MEMORY_LIMIT = 3.0  # times the bytes of x


class Prefill:
    """A step of N requests with q new tokens each, all with a history, in a ring with room for two drafts."""

    def __init__(self, rows: int, length: int, channels: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = rows * length
        self.x = torch.randn(tokens, channels, generator=generator).to(dtype)
        self.weight = torch.randn(channels, WIDTH, generator=generator).to(dtype)
        self.pool = torch.randn(rows + 1, COLUMNS, channels, generator=generator).to(dtype)
        self.slots = torch.arange(rows, 0, -1)
        self.starts = torch.arange(rows + 1) * length
        history = torch.arange(rows) + 11
        self.continues = history > 0
        self.read = (history[:, None] + torch.arange(1 - WIDTH, 0)) % COLUMNS
        self.write = (history[:, None] + length + torch.arange(-WIDTH, 0)) % COLUMNS
        self.host_slots, self.host_starts = self.slots.tolist(), self.starts.tolist()

    def run(self) -> Tensor:
        return causal_conv1d_fn(
            self.x.t(),
            self.weight,
            conv_states=self.pool.transpose(1, 2),
            has_initial_state=self.continues,
            cache_indices=self.slots,
            query_start_loc=self.starts,
            read_conv_offsets=self.read,
            write_conv_offsets=self.write,
        )

    def loop(self) -> Tensor:
        # In fp32, as depthwise F.conv1d is tens of times slower on a CPU in bf16.
        states, outs, weight = self.pool.transpose(1, 2), [], self.weight.float()[:, None]
        for row, (start, end) in enumerate(pairwise(self.host_starts)):
            slot = self.host_slots[row]
            full = torch.cat([states[slot][:, self.read[row]], self.x.t()[:, start:end]], 1)
            out = F.conv1d(full[None].float(), weight, groups=full.shape[0])
            states[slot][:, self.write[row]] = full[:, -WIDTH:]
            outs.append(F.silu(out[0]).to(full.dtype))
        return torch.cat(outs, 1)

    def transformers(self) -> Tensor:
        """Run one batch of rows of equal length, with the windows taken from the ring and put back into it."""
        form = public("models.qwen3_5.modeling_qwen3_5", "causal_conv1d_update")
        rows = self.slots.numel()
        x = self.x.view(rows, -1, self.x.shape[1]).transpose(1, 2)
        # Its window is WIDTH columns of which the oldest is not looked at.
        window = F.pad(self.pool[self.slots[:, None], self.read].transpose(1, 2), (1, 0))
        out: Tensor = form(x, window, self.weight, None, "silu")
        self.pool[self.slots[:, None], self.write] = window.transpose(1, 2)
        return out

    def copy(self) -> Tensor:
        return self.x.clone()

    def extra_memory(self) -> float:
        return peak_bytes(self.run) / self.x.nbytes


class Update:
    """A verify step of N requests with q rows each, ring layout."""

    def __init__(self, rows: int, length: int, channels: int, columns: int = COLUMNS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, length, channels, generator=generator).bfloat16()
        self.weight = torch.randn(WIDTH, channels, generator=generator).bfloat16()
        self.pool = torch.randn(rows, columns, channels, generator=generator).bfloat16()
        self.slots = torch.arange(rows - 1, -1, -1)
        self.history = torch.arange(rows) + 11

    def run(self) -> Tensor:
        return causal_conv1d_update(
            self.x, self.pool, self.weight, conv_state_indices=self.slots, cache_seqlens=self.history
        )

    def loop(self) -> list[Tensor]:
        """Convolve each request's window and new rows in fp32, as in `Prefill.loop`; write the ring by columns."""
        outs, weight, columns = [], self.weight.float().t()[:, None], self.pool.shape[1]
        for row, (slot, past) in enumerate(zip(self.slots.tolist(), self.history.tolist(), strict=True)):
            pool = self.pool[slot]
            full = torch.cat([pool[[(past + i) % columns for i in range(1 - WIDTH, 0)]], self.x[row]])
            out = F.conv1d(full.t()[None].float(), weight, groups=full.shape[1])
            for i in range(max(0, self.x.shape[1] - columns), self.x.shape[1]):
                pool[(past + i) % columns] = self.x[row, i]
            outs.append(F.silu(out[0].t()).to(full.dtype))
        return outs

    def copy(self) -> Tensor:
        return self.x.clone()


def _prefill(rows: int, length: int, channels: int, dtype: torch.dtype, target: float) -> Case:
    work = Prefill(rows, length, channels, dtype)
    kind = "fp32" if dtype == torch.float32 else "bf16"
    return Case(
        f"causal_conv1d_fn ring {rows}x{length}x{channels} {kind}",
        work.run,
        {"loop": work.loop, "transformers": work.transformers},
        work.copy,
        target,
        extra_memory=work.extra_memory,
        memory_limit=MEMORY_LIMIT,
        tokens=rows * length,
    )


def _growth(curve: str, size: int, work: Prefill | Update) -> Case:
    tokens = work.x.numel() // work.x.shape[-1]
    # Rows are what a loop grows with; on the other curves it would measure the same convolution again.
    baselines = {"loop": work.loop} if "verify" in curve else {}
    return Case(f"{curve}={size}", work.run, baselines, work.copy, growth=curve, point=size, tokens=tokens)


def cases() -> list[Case]:
    """Return the cases; each owns its tensors."""
    return [
        *(
            _prefill(rows, length, channels, dtype, target)
            for dtype in (torch.float32, torch.bfloat16)
            for rows, length, channels, target in (
                (64, 8, 2048, 3.0),
                (256, 2, 2048, 3.0),
                (16, 64, 4096, 1.5),
                (1, 2048, 4096, 2.0),
            )
        ),
        *(_growth("conv prefill tokens", n, Prefill(1, n, 1024, torch.bfloat16)) for n in (512, 1024, 2048, 4096)),
        *(_growth("conv prefill rows", n, Prefill(n, 8, 1024, torch.bfloat16)) for n in (16, 32, 64, 128)),
        *(_growth("conv prefill channels", n, Prefill(8, 64, n, torch.bfloat16)) for n in (512, 1024, 2048, 4096)),
        *(_growth("conv verify rows", n, Update(n, 3, 2048)) for n in (1, 8, 32, 64, 128)),
        *(_growth("conv verify drafts", n, Update(32, 1 + n, 2048, WIDTH + n)) for n in (0, 1, 3, 7)),
    ]
