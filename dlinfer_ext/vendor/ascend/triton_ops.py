"""The operators under the names that LMDeploy's Ascend code and dlinfer users import; they run on CPU tensors too."""

from dlinfer_ext.vendor.ascend.compat.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
from dlinfer_ext.vendor.ascend.compat.causal_conv1d import causal_conv1d_ref as causal_conv1d_ref
from dlinfer_ext.vendor.ascend.compat.causal_conv1d import causal_conv1d_update_npu as causal_conv1d_update_npu
from dlinfer_ext.vendor.ascend.compat.gated_delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
from dlinfer_ext.vendor.ascend.compat.gated_delta_rule import (
    fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule,
)
from dlinfer_ext.vendor.ascend.compat.gated_delta_rule import (
    fused_sigmoid_gating_delta_rule_update as fused_sigmoid_gating_delta_rule_update,
)
from dlinfer_ext.vendor.ascend.compat.gated_rms_norm import RMSNormGated as RMSNormGated
from dlinfer_ext.vendor.ascend.compat.gated_rms_norm import rmsnorm_fn as rmsnorm_fn
from dlinfer_ext.vendor.ascend.compat.kda import chunk_kda as chunk_kda
from dlinfer_ext.vendor.ascend.compat.kda import fused_recurrent_kda as fused_recurrent_kda
from dlinfer_ext.vendor.ascend.compat.kda import kda_gate as kda_gate
from dlinfer_ext.vendor.ascend.compat.rejection_sampling import rejection_sample as rejection_sample
