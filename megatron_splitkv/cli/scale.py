"""`splitkv scale`: how long a training step takes on a cluster, by arithmetic."""

import argparse
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import require_choice

_SETTINGS = ("weak", "strong", "ratio", "beyond")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "scale",
        help="predict step times of all strategies on 8 to 4096 ranks",
        description="A model of the drafter's training step: attention work from the real planner, "
        "volumes from their formulas, links with a latency and a speed inside nodes and between "
        "them. Four constants are fitted to the paper's bars at P = 8; the rest of its Figures 6 "
        "to 8 is held out and compared. Nothing is measured here.",
    )
    parser.add_argument(
        "--links",
        metavar="PRESET|FILE",
        help="a machine: a preset's name or a JSON file of links (default: the paper's testbed, "
        "for both readings of its speed between nodes)",
    )
    parser.add_argument(
        "--setting",
        default="all",
        metavar="NAME",
        help="weak, strong, ratio: the paper's; beyond: 256k to 64M rows on up to 4096 ranks; "
        "all (default)",
    )
    parser.add_argument(
        "--drafter",
        default="all",
        metavar="NAME",
        help="qwen3.5-35b-a3b, qwen3.5-27b, or all (default): the paper's drafters",
    )
    parser.add_argument("--output", metavar="DIR", help="write scale.json and scale-*.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    parser.add_argument(
        "--fit", action="store_true", help="only fit the constants again and print them"
    )


def run(args: argparse.Namespace) -> int:
    """Predict, print, and write what was asked for."""
    from megatron_splitkv.comm.links import links_from
    from megatron_splitkv.scale import (
        FITTED,
        MODELS,
        Machine,
        paper_machines,
        study_machine,
        to_json,
    )

    setting = require_choice("--setting", args.setting, (*_SETTINGS, "all"))
    model = require_choice("--drafter", args.drafter, (*MODELS, "all"))
    machines = paper_machines()
    if args.links:
        links = links_from(args.links)
        machines = [Machine(links.name, links, is_paper=False)]
    if args.fit:
        return _print_fit(args.json)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)  # fails before the work
    settings = _SETTINGS if setting == "all" else (setting,)
    models = MODELS if model == "all" else (model,)
    with stage_bars(quiet=args.json) as stages:
        studies = []
        for machine in machines:
            with stages.stage(machine.label) as progress:
                studies.append(study_machine(machine, settings=settings, models=models))
                progress(1, 1)
    result = {
        "constants": asdict(FITTED),
        "studies": [to_json(study) for study in studies],
    }
    if args.json:
        print(json.dumps(result))
    else:
        from rich.console import Console

        from megatron_splitkv.scale.tables import print_study

        for study in studies:
            print_study(study, Console())
    if args.output:
        from megatron_splitkv.scale.draw import draw_study

        files = [Path(args.output) / "scale.json", *draw_study(studies, args.output)]
        aside = files[0].with_suffix(".partial")
        aside.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(aside, files[0])
        if not args.json:
            print("written: " + ", ".join(map(str, files)))
    return 0


def _print_fit(as_json: bool) -> int:
    from megatron_splitkv.scale import FITTED, Constants, fit

    fresh = fit()
    if as_json:
        print(json.dumps({"fitted": asdict(fresh), "frozen": asdict(FITTED)}))
        return 0
    print("least squares over the paper's bars at P = 8 (two drafters, weak and strong scaling)")
    for field in fields(Constants):
        value, frozen = getattr(fresh, field.name), getattr(FITTED, field.name)
        print(f"{field.name:18} {value:.6g}   frozen in the package: {frozen:.6g}")
    return 0
