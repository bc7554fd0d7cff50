"""The whole way on one machine: prepare, train, export, evaluate, and a report to look at.

    python tools/quickstart.py [--target tiny|smollm2] [--drafter dflash|domino|dspark]
        [--minutes N] [--output runs/quickstart]

Every stage is a command that a user would type; it is printed before it runs. A stage that has
finished with the same command is not run again, so an interrupted run goes on where it stopped.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import ITERATION, Stages, console

# Frugal enough for a laptop: kernels of two ranks share two cores.
RANKS = 2
MINUTES_THAT_SHOW_QUALITY = 8


@dataclass(frozen=True)
class Recipe:
    """How a target's drafter is trained in a quick start.

    Args:
        train_arguments: Megatron's and ours, beside those that every recipe shares.
        steps_per_minute: training steps for each minute that the other stages leave.
        other_minutes: what the other stages take at least.
        accept_len: what the trained drafter must reach, or None if the target decides.
        new_tokens: longest continuation in the evaluation.
        must_beat: controls that the trained drafter must be clearly ahead of.
    """

    train_arguments: dict[str, Any]
    steps_per_minute: float
    other_minutes: float
    accept_len: float | None
    new_tokens: int
    must_beat: tuple[str, ...]


RECIPES = {
    "tiny": Recipe(
        {
            "--num-layers": 2,
            "--num-attention-heads": 4,
            "--num-query-groups": 2,
            "--kv-channels": 24,
            "--ffn-hidden-size": 288,
            "--block-size": 8,
            "--num-anchors": 24,
            "--loss-decay-gamma": 4,
            "--seq-length": 2048,
            "--lr": 1.5e-3,
            "--weight-decay": 0,
        },
        steps_per_minute=120,
        other_minutes=2,
        accept_len=4.0,
        new_tokens=96,  # the length of the responses that it was trained on
        must_beat=("untrained", "no_context", "ngram"),
    ),
    "smollm2": Recipe(
        {
            "--num-layers": 2,
            "--num-attention-heads": 9,
            "--num-query-groups": 3,
            "--kv-channels": 64,
            "--ffn-hidden-size": 1536,
            "--block-size": 8,
            "--num-anchors": 16,
            "--loss-decay-gamma": 4,
            "--seq-length": 1152,
            "--lr": 1.5e-3,
            "--weight-decay": 0.01,
        },
        steps_per_minute=41,
        other_minutes=6.3,
        accept_len=None,
        new_tokens=80,
        must_beat=("untrained", "no_context"),
    ),
}

# What a kind of drafter adds. Seven slots that predict what is behind them propose as many tokens
# as eight of which the first is the anchor's.
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "domino": {"--block-size": 7, "--emb-dim": 32, "--gru-hidden-dim": 96},
    "dspark": {"--block-size": 7, "--markov-rank": 32},
}


def training_command(args: argparse.Namespace, data: Path, checkpoints: Path) -> list[str]:
    """The torchrun line of this run."""
    recipe = RECIPES[args.target]
    minutes = args.minutes - recipe.other_minutes
    steps = args.train_iters or max(20, int(recipe.steps_per_minute * minutes) // 10 * 10)
    options = {
        "--context-parallel-size": RANKS,
        "--cp-comm-type": "splitkv",
        "--feature-store": data / "train",
        "--valid-feature-store": data / "valid",
        "--drafter": args.drafter,
        **recipe.train_arguments,
        **DRAFTERS[args.drafter],
        "--global-batch-size": 1,
        "--train-iters": steps,
        "--log-interval": max(1, steps // 50),
        "--eval-interval": max(1, steps // 4),
        "--save-interval": max(1, steps // 2),
        "--seed": args.seed,
        "--save": checkpoints,
        "--load": checkpoints,
    }
    # As a module: the environment's own, whatever is on PATH.
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    launcher = ["--standalone", "--nproc-per-node", str(RANKS)]
    arguments = [str(part) for pair in options.items() for part in pair]
    module = ["-m", "megatron_splitkv.pretrain_dflash", "--calculate-per-token-loss"]
    return [*torchrun, *launcher, *module, *arguments]


def write_report(args: argparse.Namespace, stages: Stages, data: Path) -> dict[str, Any]:
    """Merge what the stages found into `report.json`; draw the curves and a plan of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_splitkv.evaluate.plots import Curve, TrainingCurves, draw_training
    from megatron_splitkv.evaluate.report import write_report as write_json

    events = EventAccumulator(str(args.output / "checkpoints" / "tensorboard"))
    events.Reload()

    def curve(tag: str) -> Curve:
        scalars = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
        return Curve([s.step for s in scalars], [s.value for s in scalars])

    # The printed log has the means of its intervals, TensorBoard the last step of each.
    log = (args.output / "train.log").read_text()
    means = {int(m[1]): (float(m[3]), float(m[4])) for m in ITERATION.finditer(log)}
    loss, accept_len = ([pair[i] for pair in means.values()] for i in range(2))
    draw_training(
        TrainingCurves(
            Curve(list(means), loss),
            curve("drafter loss validation"),
            Curve(list(means), accept_len),
            curve("accept_len validation"),
        ),
        args.output / "training.png",
    )
    draw_first_pack(args, data)
    report = json.loads((args.output / "evaluation.json").read_text())
    imbalance = curve("plan imbalance").values
    report |= {
        "imbalance": sum(imbalance) / len(imbalance),
        "bytes_per_layer": curve("bytes per layer").values[-1],
        "train_loss": loss,
        "seconds": {name: stage["seconds"] for name, stage in stages.done.items()},
    }
    write_json(report, args.output / "report.json")
    return report


def draw_first_pack(args: argparse.Namespace, data: Path) -> None:
    """Draw the plan of the run's first training pack."""
    from megatron_splitkv.data.anchors import select_anchors
    from megatron_splitkv.data.packing import PackedEpochs, read_pack
    from megatron_splitkv.data.store import FeatureStore
    from megatron_splitkv.plan import build_plan
    from megatron_splitkv.plan.draw import draw_plan

    options = RECIPES[args.target].train_arguments | DRAFTERS[args.drafter]
    store = FeatureStore(data / "train")
    packing = PackedEpochs(store.lengths, options["--seq-length"], args.seed)
    pack = read_pack(store, packing.pack_documents(0))
    layout = select_anchors(
        pack.loss_mask,
        pack.cu_seqlens,
        num_anchors=options["--num-anchors"],
        block_size=options["--block-size"],
        seed=args.seed,
        step=0,
        sample_ids=pack.document_ids,
    )
    draw_plan(build_plan(layout, int(pack.cu_seqlens[-1]), RANKS), args.output / "plan.png")


def verdict(report: dict[str, Any], recipe: Recipe) -> list[str]:
    """What the run should have shown and did not, one sentence each."""
    missed = []
    if not report["greedy_equal"]:
        missed.append("the decoded text differs from plain greedy decoding")
    trained = report["accept_len"]["trained"]
    if recipe.accept_len is not None and trained < recipe.accept_len:
        missed.append(f"the acceptance length is {trained:.2f}, expected {recipe.accept_len}")
    for control in recipe.must_beat:
        spread = report["differences"][control]["interval"]
        if spread is None or spread[0] <= 0:
            missed.append(f"the trained drafter is not clearly ahead of {control}")
    return missed


def print_files(output: Path, report: dict[str, Any]) -> None:
    """Where everything is, and the numbers that the table does not show."""
    console.rule("[bold]result")
    lengths = ", ".join(f"{name} {value:.2f}" for name, value in report["accept_len"].items())
    console.print(f"tokens per draft step: {lengths}")
    console.print(
        f"plan imbalance {100 * report['imbalance']:.3f} %, "
        f"{report['bytes_per_layer']:,.0f} bytes sent by a rank in a layer of the last step"
    )
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    console.print(f"seconds: {seconds}, together {sum(report['seconds'].values()):.0f}")
    for name, what in (
        ("report.json", "all numbers"),
        ("plan.png", "who owns which context chunk, work per rank"),
        ("training.png", "loss and simulated acceptance length"),
        ("acceptance.png", "acceptance lengths, by method and by slot"),
        ("drafter", "the exported drafter (z-lab layout)"),
        ("checkpoints/tensorboard", "tensorboard --logdir"),
    ):
        console.print(f"  {output / name}  [dim]{what}[/dim]", highlight=False, soft_wrap=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(RECIPES), default="tiny")
    parser.add_argument("--drafter", choices=sorted(DRAFTERS), default="dflash")
    parser.add_argument("--minutes", type=float, default=10, help="budget of the run (default 10)")
    parser.add_argument(
        "--output", type=Path, help="default: runs/quickstart, with -TARGET and -DRAFTER"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--train-iters", type=int, help="steps, instead of those of the minutes")
    parser.add_argument("--fresh", action="store_true", help="delete the output folder first")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.output is None:
        others = [x for x in (args.target, args.drafter) if x not in ("tiny", "dflash")]
        args.output = Path("-".join(["runs/quickstart", *others]))
    if args.fresh:
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    data, checkpoints, drafter = (args.output / n for n in ("data", "checkpoints", "drafter"))
    splitkv = [sys.executable, "-m", "megatron_splitkv"]
    stages = Stages(args.output)

    prepare = ["prepare", "--target", args.target, "--output", str(data)]
    prepare += ["--minutes", str(args.minutes), "--seed", str(args.seed)]
    if args.drafter == "dspark":
        prepare += ["--final-hidden"]
    stages.run("prepare", [*splitkv, *prepare], data, threads=RANKS)
    training = training_command(args, data, checkpoints)
    stages.run("train", training, checkpoints, threads=1, watch=True)
    export = ["export", "--checkpoint", str(checkpoints), "--output", str(drafter)]
    stages.run("export", [*splitkv, *export], drafter, threads=1)
    evaluate = ["evaluate", "--drafter", str(drafter), "--target", str(data / "target")]
    evaluate += ["--prompts", str(data / "prompts.jsonl")]
    evaluate += ["--max-new-tokens", str(RECIPES[args.target].new_tokens)]
    evaluate += ["--output", str(args.output / "evaluation.json"), "--overwrite"]
    evaluate += ["--plot", str(args.output / "acceptance.png")]
    stages.run("evaluate", [*splitkv, *evaluate], args.output / "evaluation.json", threads=RANKS)
    report = write_report(args, stages, data)
    print_files(args.output, report)
    if args.train_iters or args.minutes < MINUTES_THAT_SHOW_QUALITY:
        console.print("A run this short shows the way, not the quality.")
        return 0
    missed = verdict(report, RECIPES[args.target])
    for sentence in missed:
        console.print(f"[bold red]not as it should be: {sentence}")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it stopped")
        sys.exit(130)
