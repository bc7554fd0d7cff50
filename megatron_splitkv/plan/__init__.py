"""Plans: which context-parallel rank holds which context rows and draft blocks."""

from megatron_splitkv.plan.attention_plan import AttentionPlan
from megatron_splitkv.plan.band import check_window
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan
from megatron_splitkv.plan.query_cast import QueryCast
from megatron_splitkv.plan.row_plan import RowPlan
from megatron_splitkv.plan.row_positions import even_positions, zigzag_positions
from megatron_splitkv.plan.staircase import LeafLimits, Rectangles, Staircase, build_staircase

__all__ = [
    "AttentionPlan",
    "ContextPlan",
    "LeafLimits",
    "QueryCast",
    "Rectangles",
    "RowPlan",
    "Staircase",
    "build_plan",
    "build_staircase",
    "check_window",
    "even_positions",
    "zigzag_positions",
]
