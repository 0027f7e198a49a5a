"""Kimi Delta Attention, batched PyTorch form: the routes that `dlinfer_ext.ops` binds."""

from .chunk_eager import kda
from .gate_eager import kda_gate
from .recurrent_eager import kda_update

__all__ = ["kda", "kda_gate", "kda_update"]
