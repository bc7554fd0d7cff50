"""Names that users type, in one place, and the error that bad input becomes."""

import argparse
from collections.abc import Iterable

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


def layer_ids(text: str) -> tuple[int, ...]:
    """The value of `--target-layer-ids`: numbers between commas.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,9,17") from error
