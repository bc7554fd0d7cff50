"""Ground truth and process pools that the package's own tests, and yours, stand on."""

from megatron_splitkv.testing.gloo import GlooPool, close_gloo_pools, gloo_pool, subgroup
from megatron_splitkv.testing.reference import (
    dense_sdpa_attention,
    reference_attention,
    relative_error,
    visibility_mask,
)

__all__ = [
    "GlooPool",
    "close_gloo_pools",
    "dense_sdpa_attention",
    "gloo_pool",
    "reference_attention",
    "relative_error",
    "subgroup",
    "visibility_mask",
]
