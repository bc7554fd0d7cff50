"""`splitkv doctor`: what is installed, what works here, and what to do where it does not."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_splitkv.doctor import Diagnosis


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="check versions, GPU, attention kernels, communication and files",
        description="Checks this machine, each risky thing in a process of its own with a time "
        "limit. Exit code 0: nothing that is needed is broken; 1: a red line, each of which says "
        "what to do; 2: bad input.",
    )
    for option, what in (
        ("--feature-store", "also read this feature store whole, checksums included"),
        ("--checkpoint", "also read the latest checkpoint of this --save folder"),
    ):
        parser.add_argument(
            option,
            type=Path,
            nargs="+",
            default=[],
            metavar="DIR",
            help=what + " (several may be named)",
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="that a single check may take (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Diagnose and print; returns the exit code."""
    from megatron_splitkv.doctor import diagnose

    diagnosis = diagnose(
        feature_stores=args.feature_store, checkpoints=args.checkpoint, timeout=args.timeout
    )
    if args.json:
        print(json.dumps(diagnosis.to_json()))
    else:
        print_diagnosis(diagnosis)
    return 0 if diagnosis.is_healthy else 1


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """The report as a table for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megatron_splitkv.doctor import Status

    styles = {
        Status.OK: "green",
        Status.NOTE: "dim",
        Status.WARNING: "yellow",
        Status.PROBLEM: "bold red",
    }
    table = Table(show_lines=False)
    for column in ("", "subject", "what is the case, and what to do"):
        table.add_column(column, overflow="fold")
    area = None
    for finding in diagnosis.findings:
        if finding.area != area:
            if area is not None:
                table.add_section()
            area = finding.area
        text = Text(finding.detail)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        style = styles[finding.status]
        table.add_row(Text(finding.status.value, style=style), Text(finding.subject), text)
    console = Console()
    console.print(table)
    counts = [sum(f.status is status for f in diagnosis.findings) for status in Status]
    console.print(
        f"{counts[3]} problem(s), {counts[2]} warning(s): "
        + ("all that is needed is fine" if diagnosis.is_healthy else "see the lines in red")
    )
