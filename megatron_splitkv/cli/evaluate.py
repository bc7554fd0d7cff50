"""`splitkv evaluate`: acceptance length by greedy speculative decoding with the real target."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a drafter's acceptance length with its real target",
        description="Decodes prompts greedily with the drafter and its target, compares the text "
        "with plain greedy decoding, and measures the same for an untrained drafter, for the "
        "trained one without context, and for n-gram repeat.",
    )
    parser.add_argument(
        "--drafter", required=True, metavar="DIR", help="exported drafter, see splitkv export"
    )
    parser.add_argument(
        "--target", required=True, metavar="DIR", help="Hugging Face folder of its target"
    )
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="JSONL",
        help='lines with "id" and "token_ids" (or "prompt", a text)',
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of target and drafter; equality with greedy decoding is exact in float32 only "
        "(default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="e.g. cuda (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the untrained drafter")
    parser.add_argument("--output", metavar="JSON", help="write the whole result to this file")
    parser.add_argument("--plot", metavar="PNG", help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table, write and draw what was asked for."""
    # Read when tqdm is imported: the bars of transformers would cut through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch

    from megatron_splitkv.data.target import load_target, load_tokenizer
    from megatron_splitkv.evaluate import (
        DraftModel,
        evaluate_drafter,
        print_table,
        read_prompts,
        write_report,
    )
    from megatron_splitkv.export import read_drafter

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}, it must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must not be negative")
    for file in filter(None, (args.output, args.plot)):
        Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)  # fails before the work
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {args.device} is not known; use cpu or cuda")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: this machine has no CUDA device; use cpu")

    def tokenize(text: str) -> list[int]:
        return load_tokenizer(args.target)(text)["input_ids"]

    dtype = getattr(torch, args.dtype)
    config, tensors = read_drafter(args.drafter)
    prompts = read_prompts(args.prompts, tokenize)[: args.limit]
    target = load_target(args.target, dtype).to(args.device)
    drafter = DraftModel.from_tensors(config, tensors).to(args.device, dtype)
    with stage_bars(quiet=args.json) as stages:
        result = evaluate_drafter(
            drafter,
            target,
            prompts,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            stages=stages,
        )
    values = {"drafter": args.drafter, "target": args.target, **result.to_json()}
    if args.output:
        write_report(values, args.output)
    if args.plot:
        from megatron_splitkv.evaluate.plots import draw_acceptance

        draw_acceptance(result, args.plot)
    if args.json:
        print(json.dumps(values))
    else:
        print_table(result)
    return 0
