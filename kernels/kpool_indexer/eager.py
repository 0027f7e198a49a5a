"""The indexer over pools of keys, batched PyTorch form: the routes that `dlinfer_ext.ops` binds."""

from .select_eager import kpool_select
from .update_eager import kpool_update

__all__ = ["kpool_select", "kpool_update"]
