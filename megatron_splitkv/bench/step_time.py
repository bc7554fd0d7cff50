"""Seconds of a step: replayed over the links of a machine, or those that passed.

On a CPU ranks share cores and talk over loopback, so times are replays (`comm.virtual_clock`): the
CPU-seconds that each rank computed, with a core for each, and the links of a machine. Links are
slowed down by what a core computes less than a rank of that machine. The layer stands for that of
the whole drafter, whose attention has `shrink`^2 times the operations and bytes. Times then are
those of the drafter's layer on the machine, but for one factor that all methods share.

On GPUs times are seconds that passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.bench.step_rank import CONTEXT, RankStep
from megatron_splitkv.bench.step_shape import Method, StepShape, context_flops, repeated_flops
from megatron_splitkv.comm.links import Links
from megatron_splitkv.comm.virtual_clock import replay
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan

PARTS = ("compute", "stragglers", "communication")


@dataclass(frozen=True)
class Injection:
    """Links under which timelines are replayed.

    Args:
        links: the machine, with as many ranks a node as there shall be.
        core_flops: FLOP/s of the attention kernel on one of these ranks.
        shape: what they ran.
        call_seconds: of a call of the kernel and the merge of its result, on one of these ranks.
    """

    links: Links
    core_flops: float
    shape: StepShape
    call_seconds: float = 0.0

    @property
    def slowdown(self) -> float:
        """Seconds of this run for one second of the drafter's layer on the machine."""
        return self.links.attention_flops / self.core_flops / self.shape.shrink**2

    def repeated_seconds(self, method: Method, plan: ContextPlan) -> float:
        """For the projections of other ranks' rows, of the drafter's layer on the machine."""
        flops = repeated_flops(self.shape, method, plan)
        return self.slowdown * flops / self.links.dense_flops

    def times(
        self, steps: Sequence[RankStep], method: Method, plan: ContextPlan, *, whole: bool
    ) -> NDArray[np.float64]:
        """Seconds of a step by `PARTS`.

        Args:
            steps: of all ranks.
            method: how they attended.
            plan: of the method.
            whole: with the projections that grow with the context, and with what hides behind
                them; without them nothing does.

        Shape:
            float64[3].
        """
        shape = self.shape
        timelines = [step.moments for step in steps]
        # Projections lose a factor `shrink`^2 more than attention: they count as those of the
        # drafter would on the machine.
        wanted = self.slowdown * context_flops(shape, plan) / self.links.dense_flops
        measured = float(np.mean([step.seconds(CONTEXT) for step in steps]))
        pace = {CONTEXT: wanted / measured if whole else 0.0}
        alone = replay(timelines, self.links, slowdown=0.0, pace=pace)
        linked = replay(
            timelines,
            self.links,
            slowdown=self.slowdown,
            bytes_factor=shape.shrink**2,
            pace=pace,
        )
        compute = float(np.mean([alone.spent(r, "compute") for r in range(len(steps))]))
        # Where nothing is smaller than it should be, it was measured.
        repeated = self.repeated_seconds(method, plan) if shape.shrink > 1 else 0.0
        waited = alone.seconds - compute
        return np.array([compute + repeated, waited, linked.seconds - alone.seconds])


def passed_times(steps: Sequence[RankStep], *, whole: bool) -> NDArray[np.float64]:
    """Seconds of a step that passed, by `PARTS`: what was waited for is not told apart."""
    seconds = [
        s.moments[-1].at - s.moments[0].at - (0 if whole else s.seconds(CONTEXT)) for s in steps
    ]
    return np.array([max(seconds), 0.0, 0.0])


def small_nodes(links: Links, ranks_per_node: int) -> Links:
    """The same machine with smaller nodes, and as many network cards fewer.

    Args:
        links: the machine.
        ranks_per_node: wanted.

    Raises:
        ConfigError: less than one.
    """
    if ranks_per_node < 1:
        raise ConfigError(f"ranks_per_node {ranks_per_node} must be at least 1")
    bandwidth = links.node_bandwidth * ranks_per_node / links.ranks_per_node
    cards = max(1, round(links.nics_per_node * ranks_per_node / links.ranks_per_node))
    return replace(
        links,
        ranks_per_node=ranks_per_node,
        nics_per_node=cards,
        nic_bandwidth=bandwidth / cards,
    )
