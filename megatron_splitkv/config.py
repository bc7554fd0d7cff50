"""Names that users type, in one place, and the error that bad input becomes."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence

DRAFTERS: tuple[str, ...] = ("dflash", "domino", "dspark")
CP_COMM_TYPES: tuple[str, ...] = ("splitkv", "a2a", "p2p", "ringx", "lv_xattn", "all_gather")
PLAN_STRATEGIES: tuple[str, ...] = (
    "none",
    "zigzag",
    "lpt",
    "balanced",
    "balanced-local",
    "hypergraph",
)
BLOCK_ORDERS: tuple[str, ...] = ("contiguous", "mirrored")
KERNELS: tuple[str, ...] = ("auto", "naive", "cpu", "te", "flash", "flex")
GATHER_PLACES: tuple[str, ...] = ("auto", "q", "hidden")
SCATTER_PLACES: tuple[str, ...] = ("auto", "heads", "proj")
QUERY_CASTS: tuple[str, ...] = ("auto", "all", "group")
SAVE_POLICIES: tuple[str, ...] = ("gathered", "own")
ONLINE_TARGETS: tuple[str, ...] = ("hf", "megatron")

# Share of letters that two names have in common, as `difflib` counts, from which they are close.
_CLOSE = 0.7


class ConfigError(ValueError):
    """Bad input from a user: one line that says what was wrong, the limit, and how to mend it.

    Entry points print the line and leave with exit code 2; it is raised on every rank alike and
    before any collective, so that no rank waits for another.
    """

    speaker: bool | None = None
    """Whether this rank prints the line; None: the first rank of each node does."""


def require_choice(option: str, value: str, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`.

    Args:
        option: the option as the user types it, e.g. ``--cp-comm-type``.
        value: what the user typed.
        choices: the allowed values.

    Raises:
        ConfigError: naming the option, the value and all choices.
    """
    allowed = tuple(choices)
    if value not in allowed:
        raise ConfigError(f"{option} {value!r} is not known; choose one of: {', '.join(allowed)}")
    return value


def refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Say which option is unknown and what is close to it, before argparse prints its usage.

    Whatever argparse would take, help included, is left to it.

    Args:
        parser: complete.
        words: what the user typed, the program's name left out.

    Raises:
        ConfigError: naming the unknown options.
    """
    typed = words[: words.index("--")] if "--" in words else words
    # A word with a space is no option to argparse; nor is a negative number.
    names = [word.split("=")[0] for word in typed if re.fullmatch(r"--?[A-Za-z]\S*", word)]
    unknown = [name for name in names if not _is_known(name, parser)]
    if not unknown or not {"-h", "--help"}.isdisjoint(typed):
        return
    known, said = parser._option_string_actions, []
    for name in unknown:
        close = difflib.get_close_matches(name, known, cutoff=_CLOSE)
        said.append(f"{name} (closest: {', '.join(close) or 'none'})")
    several = "s" if len(unknown) > 1 else ""
    raise ConfigError(f"unknown option{several} {', '.join(said)}; --help lists all")


def _is_known(name: str, parser: argparse.ArgumentParser) -> bool:
    """Whether argparse takes an option: abbreviated, too, and `-ofile` for `-o file`."""
    known = parser._option_string_actions
    if not name.startswith("--"):
        return name in known or name[:2] in known
    return name in known or (
        parser.allow_abbrev and any(option.startswith(name) for option in known)
    )


def layer_ids(text: str) -> tuple[int, ...]:
    """The value of `--target-layer-ids`: numbers between commas.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,9,17") from error
