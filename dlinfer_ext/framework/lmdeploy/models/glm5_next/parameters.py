"""Parameters of the blocks, and how a rank takes its share of a checkpoint's tensor."""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.distributed import get_tp_world_rank
from lmdeploy.pytorch.nn.linear import build_colwise_linear, build_merged_colwise_linear, build_o_proj
from torch import Tensor, nn


class Fp8Weight:
    """A block-FP8 weight with its scales, dequantised where it is used.

    Attributes:
        weight: float8 [out, in].
        scale: fp32 [ceil(out / block[0]), ceil(in / block[1])]; a value is weight · scale of its block.
        block: its two sides.
    """

    def __init__(self, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
        self.weight, self.scale, self.block = weight, scale, block

    def dense(self) -> Tensor:
        """Return the weight in fp32."""
        rows, columns = self.weight.shape
        scale = self.scale.float().repeat_interleave(self.block[0], 0)[:rows]
        return self.weight.float() * scale.repeat_interleave(self.block[1], 1)[:, :columns]

    def share(self, dim: int, ranks: int, rank: int) -> Tensor:
        """Return one rank's share along `dim` in fp32; only that is dequantised if it begins and ends with a block."""
        size, side = self.weight.shape[dim] // ranks, self.block[dim]
        if size % side:
            return self.dense().narrow(dim, rank * size, size)
        weight = self.weight.narrow(dim, rank * size, size)
        scale = self.scale.narrow(dim, rank * (size // side), size // side)
        return Fp8Weight(weight, scale, self.block).dense()


Source = Tensor | Fp8Weight


class Share:
    """Fills parts of a parameter with a rank's shares of checkpoint tensors.

    Args:
        parts: how many tensors fill the parameter, each an equal part of its first dimension.
        dim: of a checkpoint's tensor, split among the ranks; None if each rank has all of it.
        experts: how many experts the parameter holds in a dimension before that, each filled so; 0 if none.
    """

    def __init__(self, *, parts: int = 1, dim: int | None = 0, experts: int = 0) -> None:
        self.parts, self.dim, self.experts = parts, dim, experts
        self.tensors = parts * max(1, experts)

    def __call__(self, param: Tensor, source: Source, part: Any) -> None:
        """Copy the share of `source` to its place: `part` is None, a number, or (expert, number).

        Raises:
            ValueError: the shape does not fit.
        """
        ranks, rank = get_tp_world_rank("attn")
        if self.dim is None or ranks == 1:
            share = source.dense() if isinstance(source, Fp8Weight) else source
        elif isinstance(source, Fp8Weight):
            share = source.share(self.dim, ranks, rank)
        else:
            size = source.shape[self.dim] // ranks
            share = source.narrow(self.dim, rank * size, size)
        place = param.data
        if self.experts:
            expert, part = part
            place = place[expert]
        if self.parts > 1:
            place = place.chunk(self.parts, 0)[part]
        if share.dim() == place.dim() + 1 and 1 in share.shape:  # a depthwise convolution's [C, 1, W]
            share = share.squeeze(1)
        if share.shape != place.shape:
            raise ValueError(f"its share on this rank is {list(share.shape)}; wanted {list(place.shape)}")
        place.copy_(share)


class Held(nn.Module):
    """Holds parameters under the name that a checkpoint has for them."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, param in parameters.items():
            self.register_parameter(name, param)


def parameter(*shape: int, dtype: torch.dtype | None, device: Any, share: Share | None = None) -> nn.Parameter:
    """Return an empty parameter that is loaded by `share` (None: one tensor, all of it on every rank)."""
    param = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
    param.share = share or Share(dim=None)  # type: ignore[attr-defined]
    return param


def column_linear(inputs: int, outputs: int, dtype: Any, device: Any, *, split: bool) -> nn.Module:
    """Return a projection without bias whose outputs are split among the ranks, or which every rank has whole."""
    linear: nn.Module = build_colwise_linear(inputs, outputs, bias=False, dtype=dtype, device=device, is_tp=split)
    return _shared(linear, Share(dim=0 if split else None))


def merged_linear(inputs: int, outputs: list[int], dtype: Any, device: Any) -> nn.Module:
    """Return projections of one input, equally wide, as one: parts 0, 1 .. of it, each split among the ranks."""
    linear: nn.Module = build_merged_colwise_linear(inputs, outputs, bias=False, dtype=dtype, device=device, is_tp=True)
    return _shared(linear, Share(parts=len(outputs)))


def row_linear(inputs: int, outputs: int, dtype: Any, device: Any, *, all_reduce: bool = True) -> nn.Module:
    """Return a projection without bias whose inputs are split among the ranks; sums over them unless told not to."""
    linear: nn.Module = build_o_proj(
        inputs, outputs, bias=False, dtype=dtype, device=device, is_tp=True, all_reduce=all_reduce
    )
    return _shared(linear, Share(dim=1))


def _shared(linear: nn.Module, share: Share) -> nn.Module:
    linear.weight.share = share  # type: ignore[union-attr]
    return linear
