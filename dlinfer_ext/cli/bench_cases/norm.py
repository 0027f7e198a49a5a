"""Gated RMS norm, head dimension 128, against the module of transformers' Qwen3.5 and its expression."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer_ext.ops import gated_rms_norm

from . import Case, peak_bytes, public

HIDDEN = 128


class Norm:
    """The output norm of one layer: rows = tokens × value heads."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.gate = (torch.randn(rows, HIDDEN, generator=generator).to(dtype) for _ in range(2))
        self.weight = torch.rand(HIDDEN, generator=generator).to(dtype)

    def run(self) -> Tensor:
        return gated_rms_norm(self.x, self.gate, self.weight)

    def transformers(self) -> Tensor:
        module = public("models.qwen3_5.modeling_qwen3_5", "Qwen3_5RMSNormGated")(HIDDEN)
        module.weight = torch.nn.Parameter(self.weight, requires_grad=False)
        out: Tensor = module(self.x, self.gate)
        return out

    def plain(self) -> Tensor:
        x = self.x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = self.weight * x.to(self.x.dtype)
        return (x * F.silu(self.gate.to(torch.float32))).to(self.x.dtype)

    def copy(self) -> tuple[Tensor, Tensor]:
        return self.x.clone(), self.gate.clone()

    def extra_memory(self) -> float:
        return peak_bytes(self.run) / (4 * self.x.numel())


def cases() -> list[Case]:
    """Return the cases; each owns its tensors."""
    found = []
    for dtype, kind in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        # At decode sizes both are bound by the exponential of the gate.
        for what, rows, target, limit in (("decode 64", 64 * 32, None, None), ("prefill 2048", 2048 * 32, 1.5, 1.5)):
            work = Norm(rows, dtype)
            found.append(
                Case(
                    f"gated_rms_norm {what}x32x{HIDDEN} {kind}",
                    work.run,
                    {"plain": work.plain, "transformers": work.transformers},
                    work.copy,
                    target=target,
                    extra_memory=work.extra_memory,
                    memory_limit=limit,
                    tokens=rows // 32,
                )
            )
    for rows in (1024, 4096, 16384, 65536):
        work = Norm(rows, torch.bfloat16)
        found.append(
            Case(f"norm rows={rows}", work.run, {}, work.copy, growth="norm rows", point=rows, tokens=rows // 32)
        )
    return found
