"""Do the attention kernels compute the right thing on this device, and how fast?

    python3 tools/gpu_acceptance.py [--kernels te flash flex] [--minutes 9] [--output FILE.json]

Needs torch, numpy and one GPU; Transformer Engine is checked where it is installed. No network.
Writes a JSON file and a Markdown file beside it after every section; the same command again goes on
where the last one stopped. Exit code 1 if a section failed.

Sections: self-test (small calls with gaps), equality (bf16 against fp64, beside the error of
torch's own attention under a dense mask), dense (torch's attention without a mask, the speed to
compare with), and shapes (one rank's share of published workloads: time, TFLOP/s over the needed
pairs, memory, and sampled rows and keys against fp64).
"""

import argparse
import hashlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # nothing needs to be installed

from acceptance_problem import (  # noqa: E402
    PAPER,
    SMALL,
    TINY,
    Problem,
    Shape,
    attend,
    relative_errors,
    sampled_errors,
    sdpa,
    whole_truth,
)
from acceptance_report import Failure, Report, Skip, nvtx_range  # noqa: E402

import megatron_splitkv  # noqa: E402
from megatron_splitkv.attention.kernels import Kernel, find_kernel, machine_of  # noqa: E402
from megatron_splitkv.attention.kernels.self_test import kernel_failure  # noqa: E402
from megatron_splitkv.config import KERNELS  # noqa: E402

LSE_BOUND = 1e-4  # it is fp32 whatever the dtype
REPEATS = 3
NAIVE_PAIRS = 1 << 26  # it makes all scores


class Acceptance:
    """All sections on one device.

    Args:
        report: where they are recorded.
        device: where they run.
        kernels: names of the kernels.
        dtype: of the tensors.
        small: shapes that are compared whole.
        large: shapes that are timed.
    """

    def __init__(
        self,
        report: Report,
        device: torch.device,
        kernels: list[str],
        dtype: torch.dtype,
        small: list[Shape],
        large: list[Shape],
    ) -> None:
        self.report, self.device, self.kernels, self.dtype = report, device, kernels, dtype
        self.small, self.large = small, large
        self.on_gpu = device.type == "cuda"

    def run(self) -> None:
        """Run what is not there yet: what is quick and decides most first, what compiles last."""
        sections: list[tuple[str, Callable[[], dict[str, Any]]]] = []
        for shape in self.small:
            sections += [
                (f"self-test/{k}-{shape.name}", partial(self.self_test, k, shape))
                for k in self.kernels
            ]
        for shape in self.small:
            for logits, size in (("", 1.0), ("-large-logits", 15.0)):
                sections += [
                    (
                        f"equality/{k}-{shape.name}{logits}",
                        partial(self.equality, k, shape, size),
                    )
                    for k in self.kernels
                ]
        for shape in self.large:
            sections.append((f"dense/{shape.name}", partial(self.dense, shape)))
            sections += [
                (f"shapes/{shape.name}-{k}", partial(self.timed, k, shape)) for k in self.kernels
            ]
        for name, section in sorted(sections, key=lambda item: "flex" in item[0]):
            with nvtx_range(name, self.on_gpu):
                self.report.run(name, section)
            if self.on_gpu:
                torch.cuda.empty_cache()

    def kernel(self, name: str, shape: Shape) -> Kernel:
        """The kernel, or a `Skip` with the reason why it is not for this device."""
        found = find_kernel(name, self.device, shape.request(self.dtype))
        if isinstance(found, str):
            if "self-test" in found:
                raise Failure(found, {})
            raise Skip(found)
        return found

    def self_test(self, name: str, shape: Shape) -> dict[str, Any]:
        """Small calls with gaps; rows that nothing uses hold large numbers, then NaN."""
        kernel = self.kernel(name, shape)
        request = shape.request(self.dtype)
        remarks = {
            what: kernel_failure(kernel, request, self.device, unused_rows=value) or "right"
            for what, value in (("large in gaps", 1e4), ("NaN in gaps", float("nan")))
        }
        if any(remark != "right" for remark in remarks.values()):
            raise Failure("a small call with gaps is wrong", remarks)
        return remarks

    def equality(self, name: str, shape: Shape, size: float) -> dict[str, Any]:
        """Errors against fp64, allowed: twice those of torch's attention under a dense mask."""
        kernel, plan = self.kernel(name, shape), shape.plan()
        staircase = plan.staircase(0, kernel.LEAF_LIMITS)
        problem = Problem.draw(shape, plan, self.device, self.dtype, size)
        truth = whole_truth(problem, staircase)
        errors = relative_errors(problem.solve(kernel, staircase), truth)
        theirs = relative_errors(sdpa(problem, staircase), truth)
        allowed = {key: 2 * error for key, error in theirs.items()} | {"lse": LSE_BOUND}
        values: dict[str, Any] = errors | {f"allowed {key}": x for key, x in allowed.items()}
        return checked(values, errors, allowed)

    def dense(self, shape: Shape) -> dict[str, Any]:
        """torch's attention without a mask on as many pairs as the shape needs."""
        plan = shape.plan()
        problem = Problem.draw(shape, plan, self.device, self.dtype, 1.0)
        needed = plan.staircase(0).needed_pairs
        rows = max(1, round(needed / problem.k.shape[0]))
        leaves = [x.detach().requires_grad_() for x in (problem.q[:rows], problem.k, problem.v)]
        grad_out = problem.grad_out[:rows].transpose(0, 1)[None]

        def forward() -> torch.Tensor:
            return attend(leaves, None, problem.scale)

        def backward(out: torch.Tensor) -> object:
            return torch.autograd.grad(out, leaves, grad_out)

        return self.clock(forward, backward, shape, rows * problem.k.shape[0])

    def timed(self, name: str, shape: Shape) -> dict[str, Any]:
        """Time and memory, and whether samples are right."""
        kernel, plan = self.kernel(name, shape), shape.plan()
        staircase = plan.staircase(0, kernel.LEAF_LIMITS)
        if name == "naive" and staircase.num_rows * plan.num_rows(0) > NAIVE_PAIRS:
            raise Skip("it would make all scores of this shape")
        problem = Problem.draw(shape, plan, self.device, self.dtype, 1.0)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            return kernel.forward(problem.q, problem.k, problem.v, staircase, problem.scale)

        def backward(state: tuple[torch.Tensor, torch.Tensor]) -> object:
            return problem.backward(kernel, staircase, *state)

        values = {
            "rows": staircase.num_rows,
            "keys": problem.k.shape[0],
            "executed/needed": staircase.executed_pairs / max(1, staircase.needed_pairs),
        } | self.clock(forward, backward, shape, staircase.needed_pairs)
        errors = sampled_errors(problem, staircase, problem.solve(kernel, staircase))
        bound = 2 * torch.finfo(self.dtype).eps
        return checked(
            values | errors, errors, {key: LSE_BOUND if key == "lse" else bound for key in errors}
        )

    def clock(
        self,
        forward: Callable[[], Any],
        backward: Callable[[Any], Any],
        shape: Shape,
        pairs: int,
    ) -> dict[str, Any]:
        """Median milliseconds after a warm-up, TFLOP/s over the pairs, peak MiB beside inputs."""
        times = np.empty((REPEATS, 2))
        peaks = np.zeros(2)
        for repeat in range(-1, REPEATS):
            with nvtx_range("forward", self.on_gpu):
                state, seconds, peak = self._measure(forward)
            with nvtx_range("backward", self.on_gpu):
                _, seconds_back, peak_back = self._measure(partial(backward, state))
            if repeat >= 0:
                times[repeat] = seconds, seconds_back
            peaks = np.maximum(peaks, (peak, peak_back))
            del state
        flop = 4.0 * pairs * shape.heads * shape.width
        values: dict[str, Any] = {}
        for i, (phase, factor) in enumerate((("forward", 1.0), ("backward", 2.5))):
            median = float(np.median(times[:, i]))
            values[f"{phase} ms"] = 1e3 * median
            values[f"{phase} TFLOP/s"] = factor * flop / median / 1e12
            if self.on_gpu:
                values[f"{phase} peak MiB"] = float(peaks[i]) / 2**20
        return values

    def _measure(self, work: Callable[[], Any]) -> tuple[Any, float, int]:
        """Result, seconds and peak bytes of a piece of work."""
        if not self.on_gpu:
            begin = time.perf_counter()
            return work(), time.perf_counter() - begin, 0
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work()
        end.record()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return result, start.elapsed_time(end) / 1e3, peak


def checked(
    values: dict[str, Any], errors: dict[str, float], allowed: dict[str, float]
) -> dict[str, Any]:
    """`values`, unless an error is above what is allowed."""
    wrong = [key for key, error in errors.items() if not error <= allowed[key]]  # NaN too
    if wrong:
        raise Failure(f"{', '.join(wrong)} above the allowed error", values)
    return values


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions; a section is taken over only if all of it is the same."""
    values: dict[str, Any] = {
        "package": f"{megatron_splitkv.__version__}, sources {_digest()}",
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer engine": _version("transformer_engine"),
    }
    if device.type == "cuda":
        machine = machine_of(device)
        values |= {
            "device": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, machine.capability or ())),
            "cuda": torch.version.cuda,
            "cudnn": ".".join(map(str, machine.cudnn or ())),
        }
    return values


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _digest() -> str:
    """Of the sources that are checked."""
    content = hashlib.sha256()
    for room in ("attention", "plan"):
        for path in sorted((ROOT / "megatron_splitkv" / room).rglob("*.py")):
            content.update(path.read_bytes())
    return content.hexdigest()[:12]


def main(argv: list[str] | None = None) -> int:
    """Run the sections; 0, 1 if one failed or found no time, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kernels",
        nargs="+",
        metavar="NAME",
        choices=[name for name in KERNELS if name != "auto"],
        help="default: te flash naive flex",
    )
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does the script work?")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/gpu_acceptance.json")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --tiny tries the script itself", file=sys.stderr)
        return 2
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g} must be positive")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device!r} is no device; use cuda, cuda:1, cpu, ...")
    kernels = args.kernels or (
        ["te", "flash", "naive", "flex"] if device.type == "cuda" else ["cpu"]
    )
    report = Report(args.output, environment(device), time.monotonic() + 60 * args.minutes)
    small, large = (TINY, TINY[:2]) if args.tiny else (SMALL, PAPER)
    Acceptance(report, device, kernels, torch.bfloat16, small, large).run()
    report.write()
    print(
        f"{args.output}: {len(report.sections)} sections, {len(report.failed)} failed, "
        f"{len(report.late)} not begun in time"
    )
    return 1 if report.failed or report.late else 0


if __name__ == "__main__":
    sys.exit(main())
