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

_STORES = ("train", "valid")
_NOT_IN_THE_TABLE = ("target_checksum", "lengths")


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
    """Read the stores of a run folder, or one store, and compare all checksums.

    Args:
        path: a run folder or a store.
        stages: clock and watcher.

    Returns:
        For each store its files, bytes and problems.

    Raises:
        ConfigError: there is no store.
    """
    from megatron_splitkv.data.prepare_job import SUMMARY_FILE
    from megatron_splitkv.data.store_index import INDEX_FILE
    from megatron_splitkv.data.verify import verify_store

    stores = [path]
    if not (path / INDEX_FILE).exists():
        whole = (path / SUMMARY_FILE).exists()
        stores = [path / name for name in _STORES if whole or (path / name).exists()]
    if not stores:
        raise ConfigError(
            f"{path} is neither a store nor a prepared run: it has no {INDEX_FILE}, train or valid"
        )
    found = {}
    for store in stores:
        with stages.stage(f"verify {store.name}, MB") as progress:
            check = verify_store(
                store, lambda done, total: progress(done // 1_000_000, total // 1_000_000)
            )
        found[str(store)] = {
            "files": check.num_files,
            "bytes": check.num_bytes,
            "problems": list(check.problems),
        }
    return found


def print_verified(found: dict[str, Any]) -> None:
    """One line a store, and one for each damaged file."""
    console = Console()
    for store, check in found.items():
        problems = check["problems"]
        state = f"{len(problems)} damaged" if problems else "whole"
        size = f"{check['files']} files, {check['bytes'] / 1e6:,.1f} MB"
        console.print(f"{store}: {size}, {state}", highlight=False, markup=False, soft_wrap=True)
        for problem in problems:
            console.print(f"  {problem}", highlight=False, markup=False, soft_wrap=True)
