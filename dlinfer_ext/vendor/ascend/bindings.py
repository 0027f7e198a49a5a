"""The routes of the Ascend vendor, best first: data only."""

from __future__ import annotations

from typing import Final

from dlinfer_ext.ops._registry import Route

ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    "gated_rms_norm": (Route("eager", "dlinfer_ext.kernels.gated_rms_norm.eager:gated_rms_norm"),),
    "rejection_sample": (Route("eager", "dlinfer_ext.kernels.rejection_sampling.eager:rejection_sample"),),
    "rejection_sample_greedy": (
        Route("eager", "dlinfer_ext.kernels.rejection_sampling.eager:rejection_sample_greedy"),
    ),
}
