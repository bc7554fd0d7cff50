"""Plans: which context-parallel rank holds which context rows and draft blocks."""

from megatron_splitkv.plan.attention_plan import AttentionPlan
from megatron_splitkv.plan.band import check_window
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan, fitting_chunks
from megatron_splitkv.plan.query_cast import QueryCast
from megatron_splitkv.plan.redistribution import rows_moved
from megatron_splitkv.plan.row_plan import RowPlan
from megatron_splitkv.plan.row_positions import even_positions, zigzag_positions
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.staircase import LeafLimits, Rectangles, Staircase, build_staircase
from megatron_splitkv.plan.tiles import tile_imbalance

__all__ = [
    "AttentionPlan",
    "ContextPlan",
    "LeafLimits",
    "QueryCast",
    "Rectangles",
    "RowPlan",
    "RowSource",
    "Staircase",
    "build_plan",
    "build_staircase",
    "check_window",
    "even_positions",
    "fitting_chunks",
    "rows_moved",
    "tile_imbalance",
    "zigzag_positions",
]
