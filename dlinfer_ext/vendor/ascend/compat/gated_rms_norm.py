"""The gated RMS norm under the names that dlinfer users import."""

from dlinfer_ext.ops.gated_rms_norm import RMSNormGated as RMSNormGated
from dlinfer_ext.ops.gated_rms_norm import rmsnorm_fn as rmsnorm_fn
