"""How fast ranks exchange and compute: what `Links` needs to know about a machine, measured.

Every rank runs the same patterns in the same order. A time is that of the slowest rank, from one
barrier to the end of a few calls in a row; patterns and sizes take turns, so that what slows the
machine for a while slows all of them.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.bench.kernel_call import CALLS, smallest_call
from megatron_splitkv.bench.link_fit import (
    PATTERNS,
    PatternFit,
    Sample,
    by_pattern,
    fit_links,
    fit_pattern,
    model_error,
)
from megatron_splitkv.comm import (
    all_reduce_sum,
    launch_all_to_all,
    launch_gather_rows,
    launch_shift,
)
from megatron_splitkv.comm.links import Links, default_links
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import build_staircase

_WARM_UPS = 2
_CALLS_IN_A_ROW = 5
_ITEM = 4
_BLOCK = 16
MISFIT = 0.25  # relative error from which choices between strategies may be wrong
_FORWARD_AND_BACKWARD = 3.5  # seven products of a pair, of which forward makes two


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        sizes: bytes that a rank sends.
        repeats: timed runs of each pattern and size.
    """

    sizes: tuple[int, ...]
    repeats: int

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"sizes {self.sizes} must be numbers of bytes of at least 1")
        if len(set(self.sizes)) < 2:
            raise ConfigError(
                f"sizes {self.sizes}: latency and bandwidth need two different sizes at least"
            )
        if self.repeats < 1:
            raise ConfigError(f"repeats {self.repeats} must be at least 1")


@dataclass(frozen=True)
class LinksBenchmark:
    """What was measured and what it was made of.

    Args:
        links: the machine.
        ranks: that took part.
        backend: ``gloo`` or ``nccl``.
        samples: times.
        fits: a line per pattern.
        assumed: fields of `links` that nobody measured.
    """

    links: Links
    ranks: int
    backend: str
    samples: tuple[Sample, ...]
    fits: tuple[PatternFit, ...]
    assumed: tuple[str, ...]

    def error(self, fit: PatternFit) -> float:
        """Relative error of `links` over the samples of one line."""
        of_line = [s for s in self.samples if (s.pattern, s.within) == (fit.pattern, fit.within)]
        return model_error(of_line, self.links)

    @property
    def misfits(self) -> list[PatternFit]:
        """Lines that `links` misses by more than `MISFIT`."""
        return [fit for fit in self.fits if self.error(fit) > MISFIT]

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers; a bandwidth that no size limits is null."""
        fits = [
            asdict(fit)
            | {"bandwidth": fit.bandwidth if np.isfinite(fit.bandwidth) else None}
            | {"error_of_links": self.error(fit)}
            for fit in self.fits
        ]
        return {
            "benchmark": "links",
            "links": asdict(self.links),
            "not_measured": list(self.assumed),
            "misfits": [[fit.pattern, fit.within, self.error(fit)] for fit in self.misfits],
            "ranks": self.ranks,
            "backend": self.backend,
            "torch": torch.__version__,
            "samples": [asdict(sample) for sample in self.samples],
            "fits": fits,
        }


def measure_links(
    effort: Effort, name: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> LinksBenchmark:
    """Measure, on every rank of the default process group.

    Args:
        effort: how much.
        name: of the result.
        progress: called with (runs done, runs in all).

    Returns:
        The same on every rank.

    Raises:
        ConfigError: one rank alone, or nodes of different sizes.
    """
    ranks, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks < 2:
        raise ConfigError("bench links: one rank has no links; start 2 ranks or more")
    if ranks % local:
        raise ConfigError(
            f"bench links: {ranks} ranks are not nodes of {local}; give every node as many"
        )
    backend = dist.get_backend()
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    groups: dict[bool, dist.ProcessGroup] = {}
    if local > 1:
        nodes = [list(range(first, first + local)) for first in range(0, ranks, local)]
        groups[True], _ = dist.new_subgroups_by_enumeration(nodes)
    if ranks > local and dist.group.WORLD is not None:
        groups[False] = dist.group.WORLD
    samples = _time_patterns(effort, groups, device, progress)
    start = replace(
        default_links(device.type),
        name=name,
        dense_flops=_dense_flops(device, effort.repeats),
        attention_flops=_attention_flops(device, effort.repeats),
        call_latency=_call_latency(device, effort.repeats),
    )
    if ranks > local or device.type == "cuda":  # on a CPU's loopback any rank is a neighbour
        start = replace(start, ranks_per_node=local)
    links = fit_links(samples, start)
    assumed: tuple[str, ...] = ()
    if ranks == local and device.type == "cpu":
        links = replace(
            links, inter_latency=links.intra_latency, nic_bandwidth=links.intra_bandwidth
        )
    elif ranks == local:
        assumed = ("inter_latency", "nic_bandwidth", "nics_per_node")
    elif local == 1:
        assumed = ("intra_latency", "intra_bandwidth")
    fits = tuple(fit_pattern(group) for group in by_pattern(samples))
    return LinksBenchmark(links, ranks, backend, tuple(samples), fits, assumed)


def _time_patterns(
    effort: Effort,
    groups: dict[bool, dist.ProcessGroup],
    device: torch.device,
    progress: Callable[[int, int], None],
) -> list[Sample]:
    cases = [
        (pattern, within, *_call(pattern, size, group, device))
        for within, group in groups.items()
        for pattern in PATTERNS
        for size in effort.sizes
    ]
    total = (_WARM_UPS + effort.repeats) * len(cases)
    seconds = np.zeros((effort.repeats, len(cases)))
    for run in range(_WARM_UPS + effort.repeats):
        # Every second run in the opposite order.
        for place in range(len(cases)):
            case = place if run % 2 else len(cases) - 1 - place
            taken = _seconds_of(cases[case][3], device)
            if run >= _WARM_UPS:
                seconds[run - _WARM_UPS, case] = taken
            progress(run * len(cases) + place + 1, total)
    slowest = _of_slowest_rank(seconds, device)
    return [
        Sample(
            pattern,
            within,
            groups[within].size(),
            nbytes,
            float(np.median(slowest[:, case])),
            float(slowest[:, case].min()),
            float(slowest[:, case].max()),
        )
        for case, (pattern, within, nbytes, _) in enumerate(cases)
    ]


def _call(
    pattern: str, sent: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, Callable[[], object]]:
    """Bytes as `Links` counts them, and one call in which a rank sends about `sent` bytes."""
    ranks = group.size()
    parts = {"hop": 1, "all_reduce": 2 * (ranks - 1) / ranks}.get(pattern, ranks - 1)
    rows = max(1, round(sent / parts / _ITEM))
    x = torch.ones(rows, device=device)
    if pattern == "hop":
        return rows * _ITEM, lambda: launch_shift(
            x, group, label=pattern, received_rows=rows
        ).wait()
    if pattern == "all_reduce":
        return rows * _ITEM, lambda: all_reduce_sum(x, group, label=pattern)
    if pattern == "all_gather":
        return rows * ranks * _ITEM, lambda: launch_gather_rows(x, group, label=pattern).wait()
    parted = x.repeat(ranks)
    return rows * ranks * _ITEM, lambda: launch_all_to_all(parted, group, label=pattern).wait()


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(_CALLS_IN_A_ROW):
        call()
    _synchronize(device)
    return (time.perf_counter() - begin) / _CALLS_IN_A_ROW


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _of_slowest_rank(seconds: Any, device: torch.device) -> Any:
    slowest = torch.as_tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.cpu().numpy()


def _flops(operations: float, call: Callable[[], object], device: torch.device, runs: int) -> float:
    """Operations/s of the slowest rank while all compute; median over the runs."""
    call()
    seconds = np.array([_seconds_of(call, device) for _ in range(runs)])
    return operations / float(np.median(_of_slowest_rank(seconds, device)))


def _dense_flops(device: torch.device, runs: int) -> float:
    """A square matrix product: bf16 on a GPU, fp32 on a CPU."""
    on_cpu = device.type == "cpu"
    size = 512 if on_cpu else 8192
    dtype = torch.float32 if on_cpu else torch.bfloat16
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    return _flops(2.0 * size**3, lambda: a @ b, device, runs)


def _attention_flops(device: torch.device, runs: int) -> float:
    """The local kernel, forward and backward, over blocks that see half of the keys on average."""
    on_cpu = device.type == "cpu"
    blocks, keys, heads, width = (16, 2048, 4, 64) if on_cpu else (256, 65536, 16, 128)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, grad_out = torch.randn(2, blocks * _BLOCK, heads, width, device=device, dtype=dtype).unbind()
    k, v = torch.randn(2, keys, heads, width, device=device, dtype=dtype).unbind()
    kernel = select_kernel("auto", q)
    end = np.linspace(0, keys, blocks, dtype=np.int64)
    staircase = build_staircase(np.zeros_like(end), end, _BLOCK, kernel.LEAF_LIMITS)
    scale = width**-0.5

    def attend() -> object:
        out, lse = kernel.forward(q, k, v, staircase, scale)
        return kernel.backward(grad_out, q, k, v, out.to(dtype), lse, staircase, scale)

    operations = _FORWARD_AND_BACKWARD * 4 * heads * width * staircase.needed_pairs
    return _flops(operations, attend, device, runs)


def _call_latency(device: torch.device, runs: int) -> float:
    """Of the smallest call of the local kernel and the merge of its result."""
    on_cpu = device.type == "cpu"
    heads, width, dtype = (4, 64, torch.float32) if on_cpu else (16, 128, torch.bfloat16)
    call = smallest_call(heads, heads, width, dtype, device)
    return 1 / _flops(CALLS, call, device, runs)
