"""What of Megatron's command line a drafter does not do, and why.

Refused at start rather than ignored, or found out in the middle of a run. `docs/megatron-flags.md`
has the same list for people, and how all other options were tested.
"""

import argparse
from typing import Any

from megatron_splitkv import compat
from megatron_splitkv.config import ConfigError

_DENSE = "a drafter's MLP is dense: drop it"
_NO_DROPOUT = "split-KV attention has no dropout, and no published drafter uses any: drop it, or 0"
_EIGHT_BIT = "a drafter's linears have no 8- or 4-bit path that was tested: use --bf16"
_SHAPES = "a batch's shapes change from step to step, a graph's must not: drop it"
_SHARDED = "use --use-distributed-optimizer, which splits what costs memory here: drop it"
_OTHER_DATA = "documents come from --feature-store: drop it"
_OTHER_MODEL = "a drafter is a stack of equal DFlash layers: drop it"

# Option, the attribute that Megatron's parser fills, the values that pass, the reason and remedy.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    (
        "--pipeline-model-parallel-size",
        "pipeline_model_parallel_size",
        (1,),
        "every layer of a drafter reads the context, which would have to follow through all "
        "stages: use 1 and scale with --context-parallel-size or --tensor-model-parallel-size",
    ),
    ("--attention-dropout", "attention_dropout", (0.0,), _NO_DROPOUT),
    ("--hidden-dropout", "hidden_dropout", (0.0,), _NO_DROPOUT),
    ("--num-experts", "num_experts", (None,), _DENSE),
    ("--expert-model-parallel-size", "expert_model_parallel_size", (1,), _DENSE),
    ("--fp8-format", "fp8", (None,), _EIGHT_BIT),
    ("--fp8-param-gather", "fp8_param_gather", (False,), _EIGHT_BIT),
    ("--fp4-format", "fp4", (None,), _EIGHT_BIT),
    (
        "--fp16",
        "fp16",
        (False,),
        "the loss is scaled for its fixed-point count already, a second scale may overflow: use "
        "--bf16",
    ),
    ("--cuda-graph-impl", "cuda_graph_impl", ("none",), _SHAPES),
    ("--enable-cuda-graph", "enable_cuda_graph", (False,), _SHAPES),
    ("--external-cuda-graph", "external_cuda_graph", (False,), _SHAPES),
    ("--optimizer-cuda-graph", "optimizer_cuda_graph", (False,), _SHAPES),
    ("--use-megatron-fsdp", "use_megatron_fsdp", (False,), _SHARDED),
    ("--use-torch-fsdp2", "use_torch_fsdp2", (False,), _SHARDED),
    (
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        (1,),
        "a drafter is small enough for one: drop it",
    ),
    (
        "--optimizer-cpu-offload",
        "optimizer_cpu_offload",
        (False,),
        "a drafter's states fit when split with --use-distributed-optimizer: drop it",
    ),
    (
        "--hierarchical-context-parallel-sizes",
        "hierarchical_context_parallel_sizes",
        (None,),
        "split-KV has one level: drop it",
    ),
    (
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        (False,),
        "packs are balanced by --plan-strategy: drop it",
    ),
    ("--multi-latent-attention", "multi_latent_attention", (False,), _OTHER_MODEL),
    ("--mtp-num-layers", "mtp_num_layers", (None, 0), _OTHER_MODEL),
    ("--spec", "spec", (None,), _OTHER_MODEL),
    ("--data-path", "data_path", (None, []), _OTHER_DATA),
    ("--mock-data", "mock_data", (False,), _OTHER_DATA),
    (
        "--use-checkpoint-args",
        "use_checkpoint_args",
        (False,),
        "drafter_config.json beside the checkpoints is compared instead: drop it",
    ),
    (
        "--full-validation",
        "full_validation",
        (False,),
        "an evaluation is one pass over the validation store unless --eval-iters says otherwise: "
        "drop it",
    ),
    (
        "--log-throughput",
        "log_throughput",
        (False,),
        "it counts the FLOPs of a GPT, not of a drafter: drop it",
    ),
)


def check_unsupported(args: argparse.Namespace) -> None:
    """Refuse what of Megatron a drafter does not do.

    Args:
        args: parsed, not yet validated by Megatron. What a release does not know it cannot ask for.

    Raises:
        ConfigError: naming the option, its value, why, and the remedy.
    """
    for option, attribute, allowed, reason in _REFUSED:
        value = getattr(args, attribute, allowed[0])
        if value not in allowed:
            shown = option if value is True else f"{option} {_show(value)}"
            raise ConfigError(f"{shown} is not supported: {reason}")
    if args.sequence_parallel and args.tensor_model_parallel_size > 1:
        raise ConfigError(
            "--sequence-parallel is not supported: it splits rows between linears as "
            "--context-parallel-size does everywhere, but sends the context's rows over tensor "
            "parallelism in every layer: drop it, and where memory is short shift ranks from "
            "--tensor-model-parallel-size to --context-parallel-size"
        )
    if args.use_distributed_optimizer and args.optimizer != "adam":
        raise ConfigError(
            f"--use-distributed-optimizer cannot split --optimizer {args.optimizer}: use adam, or "
            "drop it"
        )
    if args.use_precision_aware_optimizer and not compat.has_fused_optimizers():
        raise ConfigError(
            "--use-precision-aware-optimizer needs Transformer Engine's Adam, which is not "
            "installed: drop it, or install Transformer Engine"
        )


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
