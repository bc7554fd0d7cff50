"""The one place that knows how Megatron-core's and Transformer Engine's releases differ.

Supported: megatron-core 0.18.2 up to, not including, 0.20; Transformer Engine from 2.8. What
differs is found by looking at the installed code, and named in a `ConfigError` when it is none of
the known forms.
"""

from megatron_splitkv.compat.attention_functions import (
    FusedAttention,
    bind_fused_attention,
    flex_attention_with_lse,
    fused_attention,
    has_transformer_engine,
)
from megatron_splitkv.compat.distributed_optimizer import mend_distributed_optimizer
from megatron_splitkv.compat.environment import (
    FIRST_UNKNOWN_MEGATRON_CORE,
    OLDEST_MEGATRON_CORE,
    check_environment,
    has_fused_optimizers,
    megatron_core_version,
)
from megatron_splitkv.compat.packages import installed_version, is_importable
from megatron_splitkv.compat.signatures import bind_arguments, require_parameters
from megatron_splitkv.compat.training import (
    leave_out_gpt_estimates,
    parse_args,
    publish_args,
    run_pretrain,
    skip_missing_dataset_helpers,
    transformer_config,
    validate_args,
)

__all__ = [
    "FIRST_UNKNOWN_MEGATRON_CORE",
    "OLDEST_MEGATRON_CORE",
    "FusedAttention",
    "bind_arguments",
    "bind_fused_attention",
    "check_environment",
    "flex_attention_with_lse",
    "fused_attention",
    "has_fused_optimizers",
    "has_transformer_engine",
    "installed_version",
    "is_importable",
    "leave_out_gpt_estimates",
    "megatron_core_version",
    "mend_distributed_optimizer",
    "parse_args",
    "publish_args",
    "require_parameters",
    "run_pretrain",
    "skip_missing_dataset_helpers",
    "transformer_config",
    "validate_args",
]
