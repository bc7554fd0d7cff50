"""Training that goes on from a released drafter: its architecture, then its weights.

``--initial-drafter DIR`` stands for the options that describe the drafter in the folder, so that
nobody repeats them, and gives the weights of step 0. What only training knows (loss weights, decay)
stays the command line's. A resumed run keeps its checkpoint's weights.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.export.checkpoint import TRACKER_FILE
from megatron_splitkv.export.folder import read_config, read_drafter
from megatron_splitkv.export.safetensors_files import EMBEDDING, HEAD, read_tensors
from megatron_splitkv.export.zlab import from_zlab
from megatron_splitkv.train.drafter_arguments import option_fields
from megatron_splitkv.train.drafter_file import FREE_TO_CHANGE

OPTION = "--initial-drafter"
# Options of Megatron that describe a drafter, and the field that each one sets.
_FIELD_OF = {
    "drafter": "kind",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "mask_token_id": "mask_token_id",
    "rotary_base": "rope_theta",
    "layernorm_epsilon": "rms_norm_eps",
}


def add_initial_drafter_argument(group: Any) -> None:
    """Add the option.

    Args:
        group: of Megatron's parser.
    """
    group.add_argument(
        OPTION,
        metavar="DIR",
        help="Start from a released drafter: a folder in the z-lab or the speculators layout. It "
        "stands for the options that describe the drafter (--num-layers, --block-size, ...) and "
        "gives the weights of step 0. Resuming a checkpoint keeps the checkpoint's weights.",
    )


def typed_options(parser: argparse.ArgumentParser, argv: Collection[str]) -> dict[str, str]:
    """Which options a user typed: destination to option, defaults left out.

    Args:
        parser: complete; one that does not take abbreviations, as Megatron's.
        argv: the command line.
    """
    known = parser._option_string_actions
    words = (word.split("=")[0] for word in argv)
    return {known[word].dest: word for word in words if word in known}


def take_architecture(args: argparse.Namespace, typed: Mapping[str, str]) -> None:
    """Set, in place, what the initial drafter decides about the command line.

    Args:
        args: parsed, nothing completed yet.
        typed: from `typed_options`.

    Raises:
        ConfigError: a folder that cannot be read, or an option that contradicts it.
    """
    if args.initial_drafter is None:
        return
    # The target's depth is the store's to say: `check_target` compares it where the folder does.
    config = read_config(args.initial_drafter, num_target_layers=_ANY_DEPTH)
    for name, value in _options(config):
        given = getattr(args, name)
        given = tuple(given) if isinstance(given, list) else given
        if name in typed and given != value:
            raise ConfigError(
                f"{typed[name]} {_words(given)} contradicts {OPTION} {args.initial_drafter}, whose "
                f"drafter has {_words(value)}; drop the option"
            )
        setattr(args, name, value)
    args.group_query_attention = True
    if args.max_position_embeddings is None:
        args.max_position_embeddings = max(config.max_position_embeddings, args.seq_length)


def check_target(args: argparse.Namespace, meta: StoreMeta) -> None:
    """Refuse an initial drafter of another target than the feature store's.

    Args:
        args: parsed.
        meta: of the training store.

    Raises:
        ConfigError: naming the first difference.
    """
    if args.initial_drafter is None:
        return
    target = meta.target
    config = read_config(args.initial_drafter, num_target_layers=target.num_layers)
    for what, drafter, store in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
        ("tapped layers", list(config.target_layer_ids), list(meta.target_layer_ids)),
    ):
        if drafter != store:
            raise ConfigError(
                f"{OPTION} {args.initial_drafter} is of another target than {args.feature_store}: "
                f"its {what} {drafter}, the store's {store}; prepare a store with that drafter's "
                "target and layers"
            )


def will_resume(args: argparse.Namespace) -> bool:
    """Whether Megatron is going to load weights from ``--load``.

    Args:
        args: parsed.
    """
    return args.load is not None and (Path(args.load) / TRACKER_FILE).is_file()


def read_initial_weights(
    args: argparse.Namespace, dflash: DFlashConfig, store: FeatureStore
) -> dict[str, torch.Tensor] | None:
    """Read the weights of step 0, whole, by Megatron's names.

    Args:
        args: parsed.
        dflash: the drafter of this run, which took its architecture from the folder.
        store: the training store, whose target's embedding and head must be the drafter's if it
            brings them.

    Returns:
        None without an initial drafter, and in a run that resumes a checkpoint.

    Raises:
        ConfigError: the folder is not this drafter's.
    """
    folder = args.initial_drafter
    if folder is None:
        return None
    resumes = will_resume(args)
    if args.rank == 0:
        source = f"--load {args.load}, not {OPTION} {folder}" if resumes else f"{OPTION} {folder}"
        print(f"weights to start from: {source}", flush=True)
    if resumes:
        return None
    _, tensors = read_drafter(folder, num_target_layers=dflash.num_target_layers)
    brought = read_tensors(Path(folder), names=(EMBEDDING, HEAD))
    for name, ours in zip((EMBEDDING, HEAD), store.frozen(), strict=True):
        if name in brought and not torch.equal(brought[name], ours.to(brought[name].dtype)):
            raise ConfigError(
                f"{OPTION} {folder} brings a tensor {name} that is not the target's; drafters with "
                "an embedding or a head of their own are not supported"
            )
    return from_zlab(tensors, dflash)


@torch.no_grad()
def load_initial_weights(
    model: nn.Module, whole: dict[str, torch.Tensor], *, tp_group: dist.ProcessGroup | None
) -> None:
    """Copy whole tensors into this rank's part of a model, at any parallel layout.

    Args:
        model: just built, the optimizer not yet: it copies the weights.
        whole: from `read_initial_weights`; emptied, so that no rank keeps the whole drafter.
        tp_group: ranks that share the matrices.
    """
    rank, size = group_rank(tp_group), group_size(tp_group)
    for name, parameter in model.named_parameters():
        parameter.copy_(tp_part(whole.pop(name), parameter, rank, size))
    assert not whole, f"no parameters for {sorted(whole)}"


def tp_part(whole: torch.Tensor, parameter: nn.Parameter, rank: int, size: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a tensor, by the parameter's partition attributes.

    Args:
        whole: the tensor of one process.
        parameter: of the rank; only its attributes are read. ``partition_stride`` 2 is a matrix
            of two halves (gate and up), of each of which a rank holds a part. Rows that do not
            divide, a vocabulary's, lie ``[r * n // T, (r + 1) * n // T)`` on rank r.
        rank: r.
        size: T.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    axis: int = getattr(parameter, "partition_dim", 0)
    halves = whole.chunk(getattr(parameter, "partition_stride", 1), dim=axis)
    rows = halves[0].shape[axis]
    start, stop = rank * rows // size, (rank + 1) * rows // size
    return torch.cat([half.narrow(axis, start, stop - start) for half in halves], dim=axis)


# Deep enough for any tapped layer.
_ANY_DEPTH = 1 << 20


def _options(config: DFlashConfig) -> Iterator[tuple[str, Any]]:
    """Names and values of the options that describe a drafter."""
    for name, field in _FIELD_OF.items():
        yield name, getattr(config, field)
    for name in option_fields(type(config)):
        if name not in FREE_TO_CHANGE:
            yield name, getattr(config, name)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
