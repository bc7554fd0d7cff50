"""`splitkv export`: a trained drafter as a folder that the serving engines load."""

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "export",
        help="export a trained drafter in the public z-lab (DFlash) layout",
        description="Reads the drafter from a Megatron torch_dist checkpoint, whatever parallel "
        "layout trained it, and writes model.safetensors and config.json. Needs no GPU.",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="the training's --save folder"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="which checkpoint (default: the latest)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the exported tensors (default: as trained)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export and say what was exported."""
    import torch

    from megatron_splitkv.export import export_drafter, read_drafter

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    source = export_drafter(args.checkpoint, args.output, iteration=args.iteration, dtype=dtype)
    config, tensors = read_drafter(args.output)
    facts = {
        "checkpoint": str(source),
        "drafter": args.output,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "parameters": config.num_parameters(),
        "num_speculative_tokens": config.block_size - 1,
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print(
            f"exported {facts['checkpoint']} to {facts['drafter']}: {facts['parameters']:,} "
            f"parameters in {facts['dtype']}, {facts['num_speculative_tokens']} proposed tokens a "
            "draft step"
        )
    return 0
