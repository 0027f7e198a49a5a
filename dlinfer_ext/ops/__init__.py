"""The operators' public interface: one signature each, checked, declared to torch.library and sent to a route."""

from .gated_rms_norm import RMSNormGated, gated_rms_norm, rmsnorm_fn
from .rejection_sampling import rejection_sample, unusable_positions, verify, verify_greedy

__all__ = [
    "RMSNormGated",
    "gated_rms_norm",
    "rejection_sample",
    "rmsnorm_fn",
    "unusable_positions",
    "verify",
    "verify_greedy",
]
