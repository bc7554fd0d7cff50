"""The whole way on one machine: prepare, train, export, evaluate, and a report to look at.

    python tools/quickstart.py [--target tiny|smollm2] [--minutes N] [--output runs/quickstart]

Every stage is a command that a user would type; it is printed before it runs. A stage that has
finished with the same command is not run again, so an interrupted run goes on where it stopped.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Frugal enough for a laptop: kernels of two ranks share two cores.
RANKS = 2
MINUTES_THAT_SHOW_QUALITY = 8
ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*(\d+) \|.*?drafter loss: ([\d.E+-]+) \| accept_len: ([\d.E+-]+)"
)
console = Console()


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


class Stages:
    """Runs the stages of one output folder and remembers which are finished."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.file = output / "stages.json"
        self.done: dict[str, dict[str, Any]] = (
            json.loads(self.file.read_text()) if self.file.exists() else {}
        )
        self.key = ""

    def run(
        self, name: str, command: list[str], writes: Path, *, threads: int, watch: bool = False
    ) -> None:
        """Run a command as a stage, or skip it if it finished before with the same history.

        A stage that was begun with the same history goes on with what it wrote; one whose command
        or history has changed starts without it.

        Args:
            name: of the stage.
            command: what to run.
            writes: file or folder that the stage leaves.
            threads: of each process.
            watch: the command is a training job.

        Raises:
            SystemExit: the command failed; its exit code is passed on.
        """
        content = self.key + json.dumps([name, command])
        self.key = hashlib.sha256(content.encode()).hexdigest()
        console.rule(f"[bold]{name}")
        console.print(as_typed(command), style="dim", highlight=False)
        before = self.done.get(name, {})
        if before.get("key") == self.key and "seconds" in before and writes.exists():
            console.print("finished before; not run again (--fresh starts anew)")
            return
        if before.get("key") != self.key and writes.exists():
            console.print(f"removing {writes}: it is of another run", style="dim")
            shutil.rmtree(writes) if writes.is_dir() else writes.unlink()
        self._note(name, {"key": self.key})
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait make a busy machine several times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        start = time.perf_counter()
        code = watch_training(command, env, self.output) if watch else call(command, env)
        if code:
            console.print(f"[red]{name} failed with exit code {code}")
            sys.exit(code)
        self._note(name, {"key": self.key, "seconds": round(time.perf_counter() - start, 1)})

    def _note(self, name: str, state: dict[str, Any]) -> None:
        self.done[name] = state
        aside = self.file.with_suffix(".partial")
        aside.write_text(json.dumps(self.done, indent=1))
        aside.replace(self.file)


def as_typed(command: list[str]) -> str:
    """The command as a user of the environment would type it."""
    typed = shlex.join(command).replace(sys.executable, "python")
    typed = typed.replace("python -m megatron_splitkv ", "splitkv ", 1)
    return typed.replace("python -m torch.distributed.run", "torchrun", 1)


def call(command: list[str], env: dict[str, str]) -> int:
    """Run a command that shows its own progress."""
    return subprocess.run(command, env=env, check=False).returncode


def watch_training(command: list[str], env: dict[str, str], output: Path) -> int:
    """Run the training job with its log in a file and a progress bar on the screen."""
    log = output / "train.log"
    console.print(f"log: {log}", style="dim")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    resumes = (output / "checkpoints").exists()
    with (
        open(log, "a" if resumes else "w") as file,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("starting", total=None)
        assert job.stdout is not None
        for line in job.stdout:
            file.write(line)
            file.flush()
            if match := ITERATION.search(line):
                step, total, loss = int(match[1]), int(match[2]), float(match[3])
                progress.update(bar, completed=step, total=total, description=f"loss {loss:.3f}")
        if job.wait() == 0:
            progress.update(bar, completed=progress.tasks[0].total)
    if job.returncode:
        lines = log.read_text().splitlines()
        reasons = [line for line in lines if line.startswith("error: ")] or lines[-25:]
        console.print("\n".join(reasons), markup=False)
    return job.returncode


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
        **recipe.train_arguments,
        "--global-batch-size": 1,
        "--train-iters": steps,
        "--log-interval": max(1, steps // 50),
        "--eval-interval": max(1, steps // 4),
        "--save-interval": max(1, steps // 2),
        "--seed": args.seed,
        "--save": checkpoints,
        "--load": checkpoints,
    }
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(RANKS)]
    arguments = [str(part) for pair in options.items() for part in pair]
    module = ["-m", "megatron_splitkv.pretrain_dflash", "--calculate-per-token-loss"]
    return [sys.executable, "-m", *torchrun_module(launcher), *module, *arguments]


def torchrun_module(launcher: list[str]) -> list[str]:
    """`torchrun` as a module, so that it is the environment's own."""
    return ["torch.distributed.run", *launcher[1:]]


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

    options = RECIPES[args.target].train_arguments
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
        f"{report['bytes_per_layer']:,.0f} bytes sent by a rank per layer and step, whatever the "
        f"context length"
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
    parser.add_argument("--minutes", type=float, default=10, help="budget of the run (default 10)")
    parser.add_argument(
        "--output", type=Path, help="default: runs/quickstart, or runs/quickstart-TARGET"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--train-iters", type=int, help="steps, instead of those of the minutes")
    parser.add_argument("--fresh", action="store_true", help="delete the output folder first")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.output is None:
        suffix = "" if args.target == "tiny" else f"-{args.target}"
        args.output = Path(f"runs/quickstart{suffix}")
    if args.fresh:
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    data, checkpoints, drafter = (args.output / n for n in ("data", "checkpoints", "drafter"))
    splitkv = [sys.executable, "-m", "megatron_splitkv"]
    stages = Stages(args.output)

    prepare = ["prepare", "--target", args.target, "--output", str(data), "--overwrite"]
    prepare += ["--minutes", str(args.minutes), "--seed", str(args.seed)]
    stages.run("prepare", [*splitkv, *prepare], data, threads=RANKS)
    training = training_command(args, data, checkpoints)
    stages.run("train", training, checkpoints, threads=1, watch=True)
    export = ["export", "--checkpoint", str(checkpoints), "--output", str(drafter)]
    stages.run("export", [*splitkv, *export], drafter, threads=1)
    evaluate = ["evaluate", "--drafter", str(drafter), "--target", str(data / "target")]
    evaluate += ["--prompts", str(data / "prompts.jsonl")]
    evaluate += ["--max-new-tokens", str(RECIPES[args.target].new_tokens)]
    evaluate += ["--output", str(args.output / "evaluation.json")]
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
    sys.exit(main())
