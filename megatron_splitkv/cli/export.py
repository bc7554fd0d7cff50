"""`splitkv export`: a trained drafter as a folder that the serving engines load."""

import argparse
import json
from typing import Any

_FORMATS = ("zlab", "speculators")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "export",
        help="export a trained drafter for serving engines, or convert a released one",
        description="Reads the drafter from a Megatron torch_dist checkpoint, whatever parallel "
        "layout trained it, or from a released folder, and writes model.safetensors, config.json "
        "and SERVING.md, the commands for vLLM and SGLang. Needs no GPU.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="DIR", help="the training's --save folder")
    source.add_argument(
        "--drafter", metavar="DIR", help="a folder in a public layout, to be rewritten"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="zlab",
        help="layout to write: of z-lab, for vLLM, SGLang and the `dflash` package, or of the "
        "speculators library (default: zlab)",
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="folder or name of the target, for the notes and for speculators (default: what the "
        "checkpoint says)",
    )
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

    from megatron_splitkv.config import ConfigError
    from megatron_splitkv.export import convert_drafter, export_drafter, read_drafter

    if args.drafter is not None and args.iteration is not None:
        raise ConfigError("--iteration is of a --checkpoint; drop it")
    how = {
        "dtype": None if args.dtype is None else getattr(torch, args.dtype),
        "layout": args.format,
        "target": args.target,
    }
    if args.drafter is not None:
        source = convert_drafter(args.drafter, args.output, **how)
    else:
        source = export_drafter(args.checkpoint, args.output, iteration=args.iteration, **how)
    config, tensors = read_drafter(args.output)
    facts = {
        "checkpoint": str(source),
        "drafter": args.output,
        "kind": config.kind,
        "format": args.format,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "parameters": config.num_parameters(),
        "num_speculative_tokens": config.num_proposals,
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print(
            f"exported {facts['checkpoint']} to {facts['drafter']} ({config.kind}, {args.format}): "
            f"{facts['parameters']:,} parameters in {facts['dtype']}, "
            f"{facts['num_speculative_tokens']} proposed tokens a draft step"
        )
    return 0
