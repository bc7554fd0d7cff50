"""What `splitkv prepare` shows at its end, and what `--verify` finds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_splitkv.config import ConfigError

# Torch is imported when the command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.stages import Stages
    from megatron_splitkv.data.target import Progress
    from megatron_splitkv.data.verify import ByteProgress, Check

_STORES = ("train", "valid")
_NOT_IN_THE_TABLE = ("target_checksum", "lengths", "files")


def print_summary(summary: dict[str, Any], output: Path) -> None:
    """A table of the summary, and the lengths of the documents."""
    table = Table(title=escape(f"prepared {output}"), show_header=False)
    for key, value in summary.items():
        if key in _NOT_IN_THE_TABLE or value == 0:
            continue
        if key in _STORES:
            value = (
                f"{value['documents']:,} documents, {value['tokens']:,} tokens "
                f"({value['supervised_tokens']:,} supervised), {value['bytes'] / 1e6:,.1f} MB"
            )
        elif key == "seconds":
            value = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in value.items())
        table.add_row(key.replace("_", " "), escape(str(value)))
    console = Console()
    console.print(table)
    for line in summary.get("lengths", ()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def verify(path: Path, stages: "Stages") -> dict[str, Any]:
    """Read the files of a run folder, or of one store, and compare all checksums.

    Args:
        path: a run folder or a store.
        stages: clock and watcher.

    Returns:
        For each store its files, bytes and problems; for a finished run those of its other files,
        too, and the names of what nothing is known of.

    Raises:
        ConfigError: there is no store.
    """
    from megatron_splitkv.data.prepare_job import SUMMARY_FILE
    from megatron_splitkv.data.store_index import INDEX_FILE
    from megatron_splitkv.data.verify import verify_run_files, verify_store

    stores, whole = [path], False
    if not (path / INDEX_FILE).exists():
        whole = (path / SUMMARY_FILE).exists()
        stores = [path / name for name in _STORES if whole or (path / name).exists()]
    if not stores:
        raise ConfigError(
            f"{path} is neither a store nor a prepared run: it has no {INDEX_FILE}, train or valid"
        )
    found: dict[str, Any] = {}
    for store in stores:
        with stages.stage(f"verify {store.name}, MB") as progress:
            found[str(store)] = _as_json(verify_store(store, _megabytes(progress)))
    if whole:
        with stages.stage("verify other files, MB") as progress:
            check = verify_run_files(path, _STORES, _megabytes(progress))
        found[str(path)] = _as_json(check) | {"not_checked": list(check.not_checked)}
    return found


def print_verified(found: dict[str, Any]) -> None:
    """One line a store and one for the run's other files, and one for each damaged file."""
    console = Console()

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for path, check in found.items():
        problems = check["problems"]
        state = f"{len(problems)} damaged" if problems else "whole"
        if check["files"] or problems:
            show(f"{path}: {check['files']} files, {check['bytes'] / 1e6:,.1f} MB, {state}")
        for problem in problems:
            show(f"  {problem}")
        if rest := check.get("not_checked"):
            show(f"{path}: no checksums are recorded of {', '.join(rest)}: not checked")


def _megabytes(progress: "Progress") -> "ByteProgress":
    return lambda done, total: progress(done // 1_000_000, total // 1_000_000)


def _as_json(check: "Check") -> dict[str, Any]:
    return {
        "files": check.num_files,
        "bytes": check.num_bytes,
        "problems": list(check.problems),
    }
