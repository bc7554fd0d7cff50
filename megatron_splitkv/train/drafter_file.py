"""`drafter_config.json`: what a checkpoint folder says about the drafter in it.

Megatron's checkpoint holds tensors; this file beside it says which drafter of which target they
are. A resume compares it, an export reads it.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import TargetInfo
from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE, DFlashConfig
from megatron_splitkv.drafter.kinds import config_from_json

_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
# They may change between the runs of one drafter.
FREE_TO_CHANGE = frozenset(
    {
        "loss_decay_gamma",
        "loss_weights",
        "distillation_weight",
        "base_loss_decay_ratio",
        "ce_weight",
        "l1_weight",
        "confidence_weight",
        "max_position_embeddings",
    }
)


def write_drafter_config(
    folder: str | os.PathLike[str], dflash: DFlashConfig, target: TargetInfo
) -> None:
    """Write the file so that it is whole or absent; the folder is made if need be.

    Args:
        folder: Megatron's ``--save``.
        dflash: the drafter.
        target: the model that it drafts for.
    """
    content = json.loads(dflash.to_json())
    content |= {"target_id": target.id, "target_checksum": target.checksum}
    path = Path(folder) / DRAFTER_CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".json.partial")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(aside, path)


def check_checkpoint_folder(
    option: str, folder: str | os.PathLike[str], dflash: DFlashConfig, target: TargetInfo
) -> None:
    """Refuse a folder that holds checkpoints of another drafter or of another target.

    A folder without checkpoints passes.

    Args:
        option: the option that named the folder, ``--load`` or ``--save``.
        folder: its value.
        dflash: the drafter of this run.
        target: the target of this run.

    Raises:
        ConfigError: naming the first disagreement, or an unreadable file.
    """
    if not (Path(folder) / _MEGATRON_TRACKER).is_file():
        return
    path = Path(folder) / DRAFTER_CONFIG_FILE
    try:
        found = json.loads(path.read_text())
        there = config_from_json(json.dumps(found))
        checksum, target_id = found["target_checksum"], found["target_id"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{option} {folder} holds a checkpoint but no readable {DRAFTER_CONFIG_FILE}: {error}; "
            "name the folder of a drafter"
        ) from error
    if checksum != target.checksum:
        raise ConfigError(
            f"{option} {folder} holds a drafter of target {target_id!r} (checksum {checksum}), the "
            f"feature store is of {target.id!r} ({target.checksum}); use a store of that target, "
            "or another folder"
        )
    if there.kind != dflash.kind:
        raise ConfigError(
            f"{option} {folder} holds a {there.kind} drafter, this run is of {dflash.kind}; use "
            f"--drafter {there.kind}, or another folder"
        )
    before, now = asdict(there), asdict(dflash)
    for name in now.keys() - FREE_TO_CHANGE:
        if before[name] != now[name]:
            raise ConfigError(
                f"{option} {folder} holds a drafter with {name} {before[name]}, this run has "
                f"{now[name]}; keep it, or use another folder"
            )
