"""The result as a table that needs no explanation, and as `report.json`."""

import json
import os
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.evaluate.bootstrap import Interval
from megatron_splitkv.evaluate.greedy import NEAR_TIE_GAP
from megatron_splitkv.evaluate.result import TRAINED, ContextBin, EvaluationResult

LABELS = {
    TRAINED: "trained drafter",
    "untrained": "untrained drafter",
    "no_context": "trained, no context",
    "ngram": "n-gram repeat",
}


def print_table(result: EvaluationResult, console: Console | None = None) -> None:
    """Print the acceptance lengths and whether the text was plain greedy decoding's.

    Args:
        result: of `evaluate_drafter`.
        console: where to; standard output when None.
    """
    console = console or Console()
    console.print(_table(result))
    console.print(_slots_table(result))
    if len(result.by_context()) > 1:
        console.print(_context_table(result))
    console.print(
        "Acceptance length: tokens that one draft step adds to the text, the target's own token "
        f"included; 1 if no proposal is ever right, {result.num_proposals + 1} at most. In "
        "brackets: 95 % bootstrap intervals over the prompts. 1st right: share of steps whose "
        "first proposal is accepted.",
        style="dim",
        highlight=False,
    )
    if result.truncated_prompts:
        console.print(truncation_sentence(result), style="yellow", markup=False, highlight=False)
    style = "green" if result.greedy_equal else "bold red"
    console.print(greedy_sentence(result), style=style, markup=False, highlight=False)


def greedy_sentence(result: EvaluationResult) -> str:
    """One sentence: did speculative decoding change the text?"""
    count = len(result.prompt_ids)
    if result.greedy_equal and not result.near_ties:
        return (
            f"All {count} decoded texts equal the target's plain greedy decoding token for token."
        )
    if result.greedy_equal:
        return (
            f"All {count} decoded texts equal the target's plain greedy decoding; "
            f"{result.near_ties} tokens differ by a near-tie (the two best logits within "
            f"{NEAR_TIE_GAP:g})."
        )
    first = result.mismatches[0]
    return (
        f"{len(result.mismatches)} of {count} decoded texts DIFFER from the target's plain greedy "
        f"decoding, first in prompt {first['prompt']!r} at new token {first['position']}."
    )


def truncation_sentence(result: EvaluationResult) -> str:
    """One sentence: how many prompts were cut."""
    count = len(result.prompt_ids)
    return (
        f"{result.truncated_prompts} of {count} prompts ({result.truncated_prompts / count:.0%}) "
        f"lost their beginning: {sum(result.truncated_tokens):,} tokens in all."
    )


def write_report(values: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a report so that it is whole or absent."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".partial")
    aside.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(aside, target)


def _table(result: EvaluationResult) -> Table:
    table = _plain_table(
        f"Greedy speculative decoding: {len(result.prompt_ids)} prompts, up to "
        f"{result.max_new_tokens} new tokens, blocks of {result.block_size}"
    )
    for heading in ("acceptance length", "trained ahead by", "1st right", "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    lengths, intervals, differences = result.accept_len, result.intervals, result.differences
    for method in result.steps:
        ahead = ""
        if method in differences:
            mean, spread = differences[method]
            ahead = f"{mean:.2f}{_bracketed(spread)}"
        first = result.slot_acceptance(method)[0]
        table.add_row(
            LABELS[method],
            f"{lengths[method]:.2f}{_bracketed(intervals[method])}",
            ahead,
            "-" if first is None else f"{100 * first:.0f} %",
            str(sum(map(len, result.steps[method]))),
            style="bold" if method == TRAINED else None,
        )
    return table


# A terminal's width holds so many; the report and the plot have all.
_SHOWN_SLOTS = 8


def _slots_table(result: EvaluationResult) -> Table:
    shown = min(_SHOWN_SLOTS, result.num_proposals)
    table = _plain_table(
        f"Share of steps whose first k proposals were all accepted, k = 1 .. {shown}"
    )
    for slot in range(1, shown + 1):
        table.add_column(str(slot), justify="right", no_wrap=True)
    for method in result.steps:
        rates = result.slot_acceptance(method)[:shown]
        cells = ["-" if rate is None else f"{100 * rate:.0f} %" for rate in rates]
        table.add_row(LABELS[method], *cells, style="bold" if method == TRAINED else None)
    return table


def _context_table(result: EvaluationResult) -> Table:
    bins = result.by_context()
    table = _plain_table("Acceptance length by the tokens before the drafted block")
    for context in bins:
        table.add_column(context_label(context), justify="right")
    for method in result.steps:
        lengths = [context.accept_len[method] for context in bins]
        cells = ["-" if length is None else f"{length:.2f}" for length in lengths]
        table.add_row(LABELS[method], *cells, style="bold" if method == TRAINED else None)
    steps = [str(context.steps[TRAINED]) for context in bins]
    table.add_row("steps of the trained drafter", *steps, style="dim")
    return table


def context_label(context: ContextBin) -> str:
    """A bin's contexts in few letters: ``<128``, ``128-255``, ``4k-8k``."""
    if not context.start:
        return f"<{context.stop}"
    if context.start < _THOUSAND:
        return f"{context.start}-{context.stop - 1}"
    return f"{context.start // _THOUSAND}k-{context.stop // _THOUSAND}k"


_THOUSAND = 1024


def _plain_table(title: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("proposals from", no_wrap=True)
    return table


def _bracketed(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
