"""A manifold-constrained hyper-connection: what a block reads from the residual streams, and what it leaves there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..... import ops
from .parameters import parameter


class HyperConnection(nn.Module):
    """One for each block; its parameters are fp32, as in the checkpoint, and on every rank whole."""

    def __init__(self, config: Any, device: Any) -> None:
        super().__init__()
        n = config.hc_mult
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.fn = parameter((2 + n) * n, n * config.hidden_size, **fp32)
        self.base = parameter((2 + n) * n, **fp32)
        self.scale = parameter(3, **fp32)
        # The norm of the streams has the model's eps; hc_eps is that of the mixing weights.
        self.norm_eps, self.eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's input [1, T, hidden], and the weights that `expand` wants; streams are [T, n, hidden]."""
        x, post, comb = ops.hyper_connection_pre(
            streams, self.fn, self.scale, self.base,
            norm_eps=self.norm_eps, eps=self.eps, sinkhorn_iters=self.iterations,
        )  # fmt: skip
        return x[None], post, comb

    @staticmethod
    def expand(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Return the streams after a block whose output is x [1, T, hidden]."""
        return ops.hyper_connection_post(x[0], streams, post, comb)
