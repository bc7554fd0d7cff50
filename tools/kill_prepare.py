"""Kill `splitkv prepare` again and again, go on each time, and compare with an uninterrupted run.

    python tools/kill_prepare.py [--kills 20] [--processes 1] [--regenerate] [--seed 0]

A process is killed (SIGKILL) at a random moment of its work; of several, one is killed first and
the others a moment later, as torchrun does. After each kill every file that carries a final name
must be whole. A run that comes to its end is compared file by file, and the next one begins.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import safetensors

# One thread: with several, a kernel may add in another order.
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# The text is small: so are its parts, for there to be several.
COMMAND = (
    "from megatron_splitkv.data import text_units; text_units._UNIT_BYTES = 2048; "
    "from megatron_splitkv.cli import main; raise SystemExit(main())"
)
JOB = "prepare_job"
TIMES_DIFFER = ("prepare.json",)


def make_target(folder: Path) -> None:
    """An untrained byte-level target with a chat template."""
    from megatron_splitkv.data.tiny_target import (
        TinyTargetConfig,
        build_tiny_target,
        byte_tokenizer,
        save_tiny_target,
    )

    model = build_tiny_target(TinyTargetConfig(hidden_size=32, seed=1))
    for parameter in model.parameters():
        if parameter.dim() > 1:  # Large enough that greedy choices are no near-ties.
            parameter.data.mul_(8)
    save_tiny_target(model, folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(folder)


def make_text(path: Path, samples: int, seed: int) -> None:
    """Conversations of one or two turns, of many lengths."""
    draw = random.Random(seed)
    with open(path, "w") as lines:
        for number in range(samples):
            messages = []
            for _ in range(draw.randint(1, 2)):
                question = f"{number}: " + "why " * draw.randint(1, 8)
                answer = "because " * draw.randint(1, 20)
                messages += [{"role": "user", "content": question}]
                messages += [{"role": "assistant", "content": answer}]
            lines.write(json.dumps({"conversations": messages}) + "\n")


def start(command: list[str], processes: int) -> list[subprocess.Popen[bytes]]:
    """The processes of one launch."""
    return [
        subprocess.Popen(
            command,
            env=ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(processes)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]


def kill(launched: list[subprocess.Popen[bytes]], draw: random.Random) -> None:
    """Kill one process, then the others."""
    for process in draw.sample(launched, len(launched)):
        process.kill()
        time.sleep(draw.uniform(0, 0.3) if len(launched) > 1 else 0)
    for process in launched:
        process.wait()


def units(output: Path) -> list[Path]:
    """Shards, tokenised parts of the text and batches of answers that carry a final name."""
    return [*output.rglob("shard-*.safetensors"), *output.rglob("unit-*.safetensors")]


def grows(output: Path) -> Callable[[], bool]:
    """Tells whether there are more units than now."""
    before = len(units(output))
    return lambda: len(units(output)) > before


def check_names(output: Path) -> int:
    """Open every shard that carries a final name; returns how many there are."""
    shards = units(output)
    for shard in shards:
        with safetensors.safe_open(shard, "np") as file:  # Checks the header against the size.
            file.keys()
        sidecar = shard.with_name(shard.name + ".json")
        if sidecar.exists():
            entry = json.loads(sidecar.read_text())["entry"]
            assert hashlib.sha256(shard.read_bytes()).hexdigest() == entry["sha256"], shard
    for record in output.rglob("*.json"):
        json.loads(record.read_text())
    return len(shards)


def checksums(output: Path) -> dict[str, str]:
    """Of all files of a finished run; the summary holds seconds, which differ."""
    return {
        path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in TIMES_DIFFER
    }


def where(output: Path) -> str:
    """How far a killed run is."""
    job = output / JOB
    if not job.exists():
        return "published" if (output / "prepare.json").exists() else "nothing yet"
    for record in ("summary", "samples", "target"):
        if (job / f"{record}.json").exists():
            shards = len([*job.glob("train/shard-*.json"), *job.glob("valid/shard-*.json")])
            units = len([*job.glob("*/unit-*")])
            return {
                "summary": "while publishing",
                "samples": f"features, {'some' if shards else 'no'} shards there",
                "target": f"before the samples, {'some' if units else 'no'} units there",
            }[record]
    return "before the target is described"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--regenerate", action="store_true")
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    os.environ["TQDM_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_target(folder / "target")
        make_text(folder / "text.jsonl", args.samples, args.seed)
        command = [sys.executable, "-c", COMMAND, "prepare"]
        command += ["--target", str(folder / "target"), "--text", str(folder / "text.jsonl")]
        command += ["--mask-token-id", "257", "--shard-megabytes", "0.1", "--device", "cpu"]
        if args.regenerate:
            command += ["--regenerate", "--max-new-tokens", "16", "--temperature", "0.7"]

        begun = time.monotonic()
        subprocess.run([*command, "--output", str(folder / "whole")], env=ENVIRONMENT, check=True)
        expected = checksums(folder / "whole")
        seconds = json.loads((folder / "whole" / "prepare.json").read_text())["seconds"]
        work = sum(seconds.values())
        print(f"uninterrupted: {time.monotonic() - begun:.1f} s, {work:.1f} s of them in stages")

        kills, finished = Counter[str](), 0
        output = folder / "killed"
        while kills.total() < args.kills or output.exists():
            launched = start([*command, "--output", str(output)], args.processes)
            # From the job's begin, or from this launch's first unit: loading takes a good part.
            begun = draw.choice((lambda: (output / JOB).exists(), grows(output)))
            while not begun() and launched[0].poll() is None:
                time.sleep(0.01)
            deadline = time.monotonic() + draw.uniform(0, work)
            last = kills.total() >= args.kills
            while any(p.poll() is None for p in launched) and (last or time.monotonic() < deadline):
                time.sleep(0.005)
            if any(process.poll() is None for process in launched):
                kill(launched, draw)
                kills[where(output)] += 1
                check_names(output)
                continue
            assert all(process.returncode == 0 for process in launched), "a process failed"
            assert checksums(output) == expected, "a resumed run differs"
            finished += 1
            subprocess.run(["rm", "-r", str(output)], check=True)
        for place, count in kills.most_common():
            print(f"  killed {place}: {count}")
        print(
            f"{kills.total()} kills, {finished} resumed runs equal the uninterrupted one in all "
            f"{len(expected)} files"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
