"""The console script `splitkv`: one subcommand a room, exit code 2 and one line on bad input."""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_splitkv import __version__
from megatron_splitkv.config import ConfigError, refuse_unknown_options

COMMANDS = ("doctor", "prepare", "plan", "export", "evaluate", "bench", "scale")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `splitkv` with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="splitkv", description="Train, export and measure long-context speculative drafters."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        import_module(f"megatron_splitkv.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: arguments without the program's name; ``sys.argv`` when None.

    Returns:
        The exit code: 0, 130 after Ctrl-C, or 2 for bad input: files that cannot be read or written
        included, and numbers for which no memory is there.
    """
    parser = build_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if (found := _command_parser(parser, words)) is not None:
        try:
            refuse_unknown_options(*found)
        except ConfigError as error:
            print(f"{found[0].prog}: {error}", file=sys.stderr)
            return 2
    args = parser.parse_args(words)
    command = import_module(f"megatron_splitkv.cli.{args.command}")
    try:
        return command.run(args)
    except (ConfigError, OSError) as error:
        message = str(error)
    except KeyboardInterrupt:
        print(f"splitkv {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (MemoryError, OverflowError) as error:
        message = (
            f"too large for this machine; take smaller numbers ({str(error) or 'out of memory'})"
        )
    print(f"splitkv {args.command}: {message}", file=sys.stderr)
    return 2


def _command_parser(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, Sequence[str]] | None:
    """The parser of the command that `words` begin with, and its words; None if they name none."""
    commands = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), None)
    if commands is None:
        return parser, words
    inner = commands.get(words[0]) if words else None
    return None if inner is None else _command_parser(inner, words[1:])
