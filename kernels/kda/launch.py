"""Kimi Delta Attention: the launchers that `dlinfer_ext.ops` binds, each the eager form's arguments and the chip."""

from .chunk_launch import kda
from .gate_launch import kda_gate
from .recurrent_launch import kda_update

__all__ = ["kda", "kda_gate", "kda_update"]
