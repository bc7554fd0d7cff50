"""A feature store and a checkpoint folder: whole, readable, and of one drafter."""

from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.doctor.findings import Finding, Status

AREA = "files"


def store_finding(path: Path) -> tuple[Finding, dict[str, Any]]:
    """Read a feature store whole: index, sizes, checksums.

    Args:
        path: its folder, which exists.

    Returns:
        The finding, and what the store holds.
    """
    from megatron_splitkv.data.store import FeatureStore

    subject = f"feature store {path}"
    try:
        store = FeatureStore(path, verify="full")
    except (ConfigError, OSError) as error:
        parts = [part.name for part in (path / "train", path / "valid") if part.is_dir()]
        if parts and not (path / "index.json").is_file():
            fix = f"name the store itself: {path / parts[0]}"
        else:
            fix = "write it again with `splitkv prepare`, or restore it from a copy"
        return Finding(AREA, subject, Status.PROBLEM, str(error), fix), {}
    facts = {
        "documents": store.num_documents,
        "tokens": int(store.lengths.sum()),
        "longest": int(store.lengths.max(initial=0)),
        "dtype": store.meta.dtype,
        "target": store.meta.target.id,
        "target_checksum": store.meta.target.checksum,
        "has_frozen": _has_frozen(store),
    }
    detail = (
        f"{facts['documents']:,} documents, {facts['tokens']:,} tokens (the longest "
        f"{facts['longest']:,}) in {facts['dtype']}, of target {facts['target']}; every checksum "
        "is right"
    )
    if not facts["has_frozen"]:
        detail += "; without the target's embedding and head: for validation only"
    return Finding(AREA, subject, Status.OK, detail), facts


def _has_frozen(store: Any) -> bool:
    try:
        store.frozen()
    except ConfigError:
        return False
    return True


def checkpoint_findings(folder: Path) -> tuple[list[Finding], dict[str, Any]]:
    """Read the latest checkpoint of a folder: table, files, the drafter's tensors.

    Args:
        folder: Megatron's ``--save``, which exists.

    Returns:
        The findings, and what the checkpoint holds.
    """
    subject = f"checkpoint {folder}"
    try:
        facts = _read_checkpoint(folder)
    except (ConfigError, OSError) as error:
        fix = (
            "name the folder that was --save of a drafter's training; if it is, give an earlier "
            "iteration (--ckpt-step, `splitkv export --iteration`) or restore a copy"
        )
        return [Finding(AREA, subject, Status.PROBLEM, str(error), fix)], {}
    detail = (
        f"iteration {facts['iteration']}, torch_dist written by {facts['writers']} rank(s), "
        f"loads at any layout; {facts['parameters']:,} trained parameters in {facts['dtype']}, "
        f"of target {facts['target']}"
    )
    if facts["has_optimizer"]:
        return [Finding(AREA, subject, Status.OK, detail)], facts
    detail += "; without optimizer states: it can be exported, but training starts Adam anew"
    return [Finding(AREA, subject, Status.NOTE, detail)], facts


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    """What the latest checkpoint holds.

    Raises:
        ConfigError: anything that keeps it from being resumed or exported.
    """
    import json

    from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE
    from megatron_splitkv.drafter.kinds import load_config
    from megatron_splitkv.export.checkpoint import find_iteration, read_model_tensors
    from megatron_splitkv.export.dcp_reader import TensorReader
    from megatron_splitkv.export.zlab import check_tensors, megatron_shapes

    path = find_iteration(folder)
    config_file = folder / DRAFTER_CONFIG_FILE
    if not config_file.is_file():
        raise ConfigError(f"{folder} has no {DRAFTER_CONFIG_FILE}: it is of no drafter")
    config = load_config(config_file)
    reader = TensorReader(path)
    # A file up to Megatron 0.18, an object in the table from 0.19 on.
    entries = reader.read_metadata().state_dict_metadata
    if not (path / "common.pt").is_file() and not any(
        x.startswith("common_state") for x in entries
    ):
        raise ConfigError(f"{path} has no common.pt, which Megatron needs to resume")
    if not (path / "metadata.json").is_file():
        raise ConfigError(f"{path} has no metadata.json, which Megatron needs to resume")
    _check_files(path, reader)
    tensors = read_model_tensors(path)
    check_tensors(tensors, megatron_shapes(config), str(path))
    wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]} holds NaN or infinite values")
    files = {info.relative_path for info in reader.read_metadata().storage_data.values()}
    return {
        "iteration": int(path.name.removeprefix("iter_")),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})),
        # A file is called after the rank that wrote it: __3_0.distcp.
        "writers": len({name.split("_")[2] for name in files if name.startswith("__")}),
        "has_optimizer": any(
            name.startswith(("optimizer.", "chained_")) for name in reader.tensors
        ),
        "target": json.loads(config_file.read_text()).get("target_id", "unknown"),
    }


def _check_files(path: Path, reader: Any) -> None:
    """Refuse data files that are missing or shorter than the table says."""
    ends: dict[str, int] = {}
    for info in reader.read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"{file} is missing although the checkpoint's table lists it")
        if file.stat().st_size < end:
            raise ConfigError(
                f"{file} has {file.stat().st_size} bytes, the checkpoint's table needs {end}: it "
                "is truncated"
            )
