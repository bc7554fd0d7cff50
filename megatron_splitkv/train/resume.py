"""Whether a checkpoint can be resumed, found out before anything is read into a model.

Megatron finds out in the middle of loading, with a traceback from every rank.
"""

import argparse
import zipfile
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export.checkpoint import TRACKER_FILE, find_iteration
from megatron_splitkv.export.dcp_reader import TensorReader

# Which optimizer wrote a checkpoint shows in what it keeps of a parameter beside its moments.
_MOMENT = "optimizer.state.exp_avg."
_MASTER_OF = {
    "optimizer.state.param.": "the distributed optimizer",
    "optimizer.state.fp32_param.": "the plain optimizer in bf16",
}
_NO_MASTER = "the plain optimizer in fp32"
_COMMON = "common_state/"
_REMEDY = "or start the optimizer anew with --no-load-optim"


def check_resumable(args: argparse.Namespace) -> None:
    """Refuse a ``--load`` whose checkpoint is damaged or was written by another kind of optimizer.

    A folder without checkpoints passes: the run starts from the beginning.

    Args:
        args: validated by Megatron.

    Raises:
        ConfigError: naming the file and what is wrong with it, or the two optimizers.
    """
    if args.load is None or not (Path(args.load) / TRACKER_FILE).is_file():
        return
    try:
        path = find_iteration(args.load, args.ckpt_step)
        reader = TensorReader(path)
        reader.check_files()
        _check_common(path, reader)
    except ConfigError as error:
        raise ConfigError(
            f"--load {args.load} cannot be resumed: {error}; choose another iteration with "
            "--ckpt-step"
        ) from error
    if not (args.finetune or args.no_load_optim):
        _check_optimizer(args, path, set(reader.tensors))


def _check_common(path: Path, reader: TensorReader) -> None:
    """What is the same on all ranks: arguments, schedule, optimizer groups."""
    if not (path / "metadata.json").is_file():
        raise ConfigError(f"{path / 'metadata.json'} is missing: it was not written to its end")
    if any(name.startswith(_COMMON) for name in reader.read_metadata().state_dict_metadata):
        return  # among the data, as 0.19 writes it
    common = path / "common.pt"
    if not common.is_file():
        raise ConfigError(f"{common} is missing")
    if not zipfile.is_zipfile(common):  # its directory is written last
        raise ConfigError(f"{common} is truncated")


def _check_optimizer(args: argparse.Namespace, path: Path, names: set[str]) -> None:
    if not any(name.startswith(_MOMENT) for name in names):
        return  # of another kind altogether, or none: Megatron says what it misses
    wrote = next(
        (
            kind
            for prefix, kind in _MASTER_OF.items()
            if any(name.startswith(prefix) for name in names)
        ),
        _NO_MASTER,
    )
    if args.use_distributed_optimizer:
        reads = "the distributed optimizer"
    else:
        reads = "the plain optimizer in bf16" if args.bf16 else _NO_MASTER
    if wrote != reads:
        raise ConfigError(
            f"--load {path} was written by {wrote}, this run has {reads}; keep "
            f"--use-distributed-optimizer and --bf16 as they were, {_REMEDY}"
        )
