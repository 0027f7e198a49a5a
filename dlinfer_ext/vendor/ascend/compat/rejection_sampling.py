"""Rejection sampling under the name that dlinfer users import."""

from dlinfer_ext.ops.rejection_sampling import rejection_sample as rejection_sample
