"""Rows of a captured step from static buffers of this package, whatever the host's graph runner binds.

A graph replays one step's calls on the memory that step had. LMDeploy's runners copy a step's metadata into buffers
that the model makes and fills (`make_buffers_cudagraph`, `fill_buffers_cudagraph`), and dlinfer puts others in their
place: lengths that are cumulative and on the host, no `cu_seqlens_q`, slot 0 for a padded row. Nothing of that is
relied on here. Both methods are wrapped on the model: each bucket gets rows at fixed addresses, filled from the step's
metadata before the host changes it, and `GatedDeltaMetadata` takes them.

dlinfer runs the first step of a bucket twice to capture it, and then fills its buffers again and replays. Run on real
rows, a state that is not a ring would take each token three times. So while a graph is captured all rows are padded
ones, which write nowhere, and the replay does the step. For that fill the metadata is put back as it was: the host's
first fill has bound it to the very buffers that the second one clears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from . import contract, counters

BUCKET: Final = "gated_delta_bucket"  # on the host's record of a bucket
ROWS: Final = "gated_delta_rows"  # on the metadata of a step that has a graph's shape


class GraphRows:
    """The rows of one bucket; the tensors keep their addresses.

    Attributes:
        cu_seqlens: int32 [N + 1], multiples of the query length; never changes.
        history_lens: int32 [N], 0 for a padded row.
        state_indices: int64 [N], -1 for a padded row.
        is_decoding: True: a graph has decode and verify steps only.
        host_lengths: None, as in every such step.
    """

    is_decoding: Final = True
    host_lengths: Final = None

    def __init__(self, rows: int, query_len: int, device: torch.device) -> None:
        self.cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len
        self.history_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.state_indices = torch.full((rows,), -1, dtype=torch.int64, device=device)

    def pad(self) -> None:
        """Make every row a padded one."""
        self.history_lens.zero_()
        self.state_indices.fill_(-1)

    def fill(self, history_lens: Tensor, state_ids: Tensor) -> None:
        """Take the rows of a step; those behind them are padded. Copies on the device, reads nothing.

        Args:
            history_lens: int [B], B <= N.
            state_ids: int [B].
        """
        self.pad()
        self.history_lens[: history_lens.size(0)].copy_(history_lens)
        self.state_indices[: state_ids.size(0)].copy_(state_ids)


@dataclass
class _Bucket:
    """What is kept of a bucket: its rows (None for a model without states), and whether its capture has begun."""

    rows: GraphRows | None
    captured: bool = False


class _Found:
    """The fields of the host's records as a step brought them, before the host bound them to its buffers."""

    def __init__(self, attention: Any, *others: Any) -> None:
        self.attention = attention
        self._fields = [(r, dict(vars(r))) for r in (attention, *others) if r is not None]

    def put_back(self) -> None:
        for record, fields in self._fields:
            vars(record).clear()
            vars(record).update(fields)


class RowBinder:
    """The wrappers of one model's `make_buffers_cudagraph` and `fill_buffers_cudagraph`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.awaited: _Found | None = None  # the step that a graph is being captured with, until its replay is filled

    def make(self, graph_meta: Any, **kwargs: Any) -> Any:
        """Make the host's buffers, and the bucket's rows if the model keeps states.

        Raises:
            ValueError: the bucket's tokens are not its rows times the step's query length.
        """
        buffers = type(self.model).make_buffers_cudagraph(self.model, graph_meta, **kwargs)
        state_ids = kwargs.get("state_ids")
        rows = None
        if state_ids is not None:
            query_len = kwargs["input_ids"].size(-1) // state_ids.size(0)
            if graph_meta.max_batchs * query_len != graph_meta.max_tokens:
                raise ValueError(
                    f"the host captures {graph_meta.max_batchs} rows of {graph_meta.max_tokens} tokens in all for a "
                    f"step of {query_len} tokens a row: this dlinfer has no graphs for such a step; set eager_mode=True"
                )
            rows = GraphRows(graph_meta.max_batchs, query_len, state_ids.device)
        setattr(graph_meta, BUCKET, _Bucket(rows))
        return buffers

    def fill(self, graph_meta: Any, **kwargs: Any) -> Any:
        """Fill the host's buffers and the bucket's rows; the first fill of a bucket is that of its capture."""
        attention, bucket = kwargs["attn_metadata"], getattr(graph_meta, BUCKET)
        if not bucket.captured:
            bucket.captured = True
            context = self.model.ctx_mgr.current_context()
            self.awaited = _Found(attention, getattr(context, "moe_metadata", None))
        elif self.awaited is not None and self.awaited.attention is attention:
            self.awaited.put_back()
            self.awaited = None
        # Of the step as it came: the host is about to put its own lengths there.
        history_lens = attention.kv_seqlens - attention.q_seqlens
        filled = type(self.model).fill_buffers_cudagraph(self.model, graph_meta, **kwargs)
        rows = bucket.rows
        if rows is not None:
            if self.awaited is not None:
                rows.pad()
            else:
                rows.fill(history_lens, kwargs["state_ids"])
                counters.count_step(rows, attention)
            setattr(attention, ROWS, rows)
        return filled


def attach(runner: Any) -> Any:
    """Give the steps of a graph runner rows from static buffers; returns it, or does nothing without graphs.

    Args:
        runner: an LMDeploy graph runner. It is changed, and so is its model: both buffer methods, on the instance.

    Raises:
        HostMismatch: LMDeploy does not have what this relies on.
        RuntimeError: (by a later step) the runner took the run that a graph was captured with for the step itself.
            All its rows were padded, so what it gives is wrong.
    """
    model = runner.model
    if runner.backend_config.eager_mode or not hasattr(model, "fill_buffers_cudagraph"):
        return runner
    contract.require(("H14",))
    binder = RowBinder(model)
    model.make_buffers_cudagraph, model.fill_buffers_cudagraph = binder.make, binder.fill
    cls: Any = type(runner)

    def call(self: Any, **kwargs: Any) -> Any:
        binder.awaited = None
        output = cls.__call__(self, **kwargs)
        if binder.awaited is not None:
            raise RuntimeError(
                f"{cls.__module__}.{cls.__name__} captured a graph and did not replay it for the step it was captured "
                "with: dlinfer_ext relies on that; set eager_mode=True"
            )
        return output

    runner.__class__ = type(cls.__name__, (cls,), {"__call__": call})
    return runner
