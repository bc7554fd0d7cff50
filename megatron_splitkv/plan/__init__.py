"""Plans: which context-parallel rank holds which context rows and draft blocks."""

from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan
from megatron_splitkv.plan.staircase import LeafLimits, Rectangles, Staircase, build_staircase

__all__ = [
    "ContextPlan",
    "LeafLimits",
    "Rectangles",
    "Staircase",
    "build_plan",
    "build_staircase",
]
