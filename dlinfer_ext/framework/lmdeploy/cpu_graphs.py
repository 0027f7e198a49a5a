"""Decode and verify steps in the shape a captured graph gives them, on a CPU.

On a card a step is captured once per bucket of batch sizes and replayed: the batch is padded to the bucket, its inputs
are copied into buffers that keep their addresses, and the output is read from a buffer too. A CPU captures nothing,
but all of that can be had without a graph. The buffers, their padding and the cut are LMDeploy's own
(`CudaGraphMixin`, and each model's additions to it); what only its Ascend metadata has is padded here alike.

A padded row holds the newest tokens of a request that has just begun and owns nothing: `query_len` random tokens, no
history, the reserved key and value block 0. What its state slot and the row lengths are is the runner's `Card`; gated
delta layers take theirs from graph_rows.py.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Final

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMeta
from torch import Tensor

from . import capture_guard, contract, counters

FILL: Final = "lmdeploy.pytorch.kernels.cuda.step_metadata.fill_graph_common_inputs"


def offer_fill() -> None:
    """Make LMDeploy's `fill_graph_common_inputs` importable without Triton.

    The function has a branch in plain PyTorch for buffers that are not on a CUDA device; the module around it, and the
    packages above it, are Triton kernels. Only the function's own source is executed.

    Raises:
        HostMismatch: LMDeploy has no such function.
    """
    if FILL in sys.modules:
        return
    path = contract.host_root().joinpath(*FILL.split(".")).with_suffix(".py")
    name = FILL.rpartition(".")[2]
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    found: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise contract.HostMismatch(f"{FILL} has no {name}: steps of eager_mode=False cannot be padded on a CPU")
    module = ModuleType(FILL)
    module.__dict__["torch"] = torch
    exec(compile(ast.Module(found, []), str(path), "exec"), module.__dict__)
    sys.modules[FILL] = module


@dataclass(frozen=True)
class Card:
    """What a runner puts into a padded step; the defaults are LMDeploy's, `DLINFER` is what dlinfer does on a card.

    Attributes:
        pad_slot: the state slot of a padded row.
        cumulative_q_seqlens: `q_seqlens` holds the end of each row.
        stale_cu_seqlens: `cu_seqlens_q` stays the tensor of the bucket's first step, whose memory is used anew.
    """

    pad_slot: int = -1
    cumulative_q_seqlens: bool = False
    stale_cu_seqlens: bool = False


DLINFER: Final = Card(pad_slot=0, cumulative_q_seqlens=True, stale_cu_seqlens=True)


class Bucket:
    """The buffers of one step shape, and one model's steps on them.

    Attributes:
        meta: LMDeploy's record of the bucket: rows, tokens, the buffers by name.
        outputs: the output tensors by name, overwritten by every step as a graph's are.
    """

    def __init__(self, model: Any, meta: CudaGraphMeta) -> None:
        self.model = model
        self.meta = meta
        self.outputs: dict[str, Any] = {}
        self._lengths: dict[str, Tensor] = {}

    def capture(self, key: tuple[Any, ...], card: Card, **kwargs: Any) -> None:
        """Do what dlinfer does to capture a graph: fill new buffers with the first step, and run the model twice."""
        self.meta.input_buffers = self.model.make_buffers_cudagraph(self.meta, **kwargs)
        padded = self._bind(card, **kwargs)
        self.model(**padded)
        with capture_guard.watch(key):
            self._give(self.model(**padded))
        if card.stale_cu_seqlens:
            self._lengths["cu_seqlens_q"].zero_()  # the first step is over, its memory goes to another
        counters.add("captures")

    def run(self, key: tuple[Any, ...], card: Card, **kwargs: Any) -> dict[str, Any]:
        """Run one step of at most `meta.max_batchs` rows; its metadata is changed in place, as on a card."""
        padded = self._bind(card, **kwargs)
        with capture_guard.watch(key):
            output = self.model(**padded)
        self._give(output)
        cut: dict[str, Any] = self.model.get_outputs_cudagraph(self.outputs, **kwargs)
        return cut

    def _give(self, output: Any) -> None:
        for name, value in self.model.make_output_buffers(output).items():
            if isinstance(value, Tensor) and isinstance(self.outputs.get(name), Tensor):
                self.outputs[name].copy_(value)
            else:
                self.outputs[name] = value

    def _bind(self, card: Card, **kwargs: Any) -> dict[str, Any]:
        """Copy a step's inputs into the buffers; return what the model is called with."""
        attention = kwargs["attn_metadata"]
        if attention.block_offsets.dtype != torch.int32:
            attention.block_offsets = attention.block_offsets.to(torch.int32)
        padded: dict[str, Any] = self.model.fill_buffers_cudagraph(self.meta, **kwargs)
        if self.meta.is_ssm:
            padded["state_ids"][kwargs["state_ids"].size(0) :] = card.pad_slot
        context = self.model.ctx_mgr.current_context()
        self.model.update_context_cudagraph(self.meta, context)
        self._bind_ascend_fields(attention)
        self._bind_lengths(card, attention)
        context.kv_start_indices = attention.kv_start_indices
        return padded

    def _bind_lengths(self, card: Card, attention: Any) -> None:
        """Bind the row lengths that dlinfer does not bind as LMDeploy does."""
        rows, query = self.meta.max_batchs, self.meta.decode_query_len
        if not self._lengths:
            ends = torch.arange(rows + 1, dtype=torch.int32) * query
            self._lengths = {"q_seqlens": ends[1:].clone(), "cu_seqlens_q": ends}
        if card.cumulative_q_seqlens:
            attention.q_seqlens = self._lengths["q_seqlens"]
        if card.stale_cu_seqlens:
            attention.cu_seqlens_q = self._lengths["cu_seqlens_q"]

    def _bind_ascend_fields(self, attention: Any) -> None:
        """Pad and bind what only LMDeploy's Ascend metadata has."""
        rows, query = self.meta.max_batchs, self.meta.decode_query_len
        tokens = torch.arange(rows * query)
        padding = {
            "kv_start_indices": tokens % query,  # the first positions of block 0, which is LMDeploy's for dummies
            "kv_seqlens_cpu": torch.full((rows,), query),
            "cu_seqlens_q_cpu": torch.arange(rows + 1) * query,
            "cache_seqlens": torch.zeros(rows),
        }
        for name, pad in padding.items():
            value = getattr(attention, name)
            if value is None:
                continue
            buffer = self.meta.input_buffers.setdefault(name, torch.empty(pad.shape, dtype=value.dtype))
            buffer.copy_(pad)
            buffer[: value.size(0)] = value
            setattr(attention, name, buffer)


class PaddedGraphRunner(GraphRunner):  # type: ignore[misc]
    """LMDeploy's graph runner for eager_mode=False on a CPU: decode and verify steps padded to a bucket, no graph.

    The first step of a bucket is run as dlinfer runs it: twice to capture, and once more after a second fill.

    Attributes:
        card: what it puts into a padded step.
    """

    card: ClassVar[Card] = Card()

    def __init__(self, model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any) -> None:
        super().__init__(model, model_config, cache_config, backend_config, device)
        offer_fill()
        self._buckets: dict[tuple[Any, ...], Bucket] = {}

    def __call__(self, **kwargs: Any) -> Any:
        """Run one step; prefill goes to the model as it is."""
        context = self.ctx_mgr.current_context()
        supported = getattr(self.model, "support_cuda_graph", None)
        if supported is None or not (context.global_is_decoding() and supported(**kwargs)):
            return self.model(**kwargs)
        rows: int = kwargs["attn_metadata"].q_seqlens.size(0)
        query_len: int = kwargs["input_ids"].size(-1) // rows
        size = self._bucket_size(self.get_meta().padding_batch_size or rows)
        key = (size, query_len, *self.model.get_cudagraph_extra_key(**kwargs))
        bucket = self._buckets.get(key)
        place = (id(self), *key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(self.model, self._bucket_meta(size, query_len))
            bucket.capture(place, self.card, **kwargs)
        if size > rows:
            counters.add("padded_steps")
            counters.add("padded_rows", size - rows)
        return bucket.run(place, self.card, **kwargs)

    def _bucket_size(self, rows: int) -> int:
        """Return the smallest captured batch size that holds `rows`.

        Raises:
            ValueError: none does.
        """
        sizes: list[int] = self.get_capture_batch_sizes()
        fitting = [size for size in sizes if size >= rows]
        if not fitting:
            raise ValueError(f"a step of {rows} rows does not fit the captured batch sizes {sizes}")
        return min(fitting)

    def _bucket_meta(self, size: int, query_len: int) -> CudaGraphMeta:
        config = self.model_config
        return CudaGraphMeta(
            max_batchs=size,
            max_tokens=size * query_len,
            num_blocks=self.cache_config.num_gpu_blocks,
            is_decoding=True,
            device=self.device,
            input_buffers={},
            output_buffers={},
            vocab_size=config.vocab_size,
            decode_query_len=query_len,
            is_ssm=bool(config.states_shapes),
            use_mrope=config.use_mrope,
            block_size=config.block_size,
        )

    def reset(self) -> None:
        """Forget the buffers; called when the engine's caches are made anew or it closes."""
        super().reset()
        self._buckets.clear()
