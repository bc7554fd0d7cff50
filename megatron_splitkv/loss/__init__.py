"""The drafter's loss: numerator, count, report."""

from megatron_splitkv.loss.dpace import dpace_weights
from megatron_splitkv.loss.draft_loss import DraftLoss, chunked_draft_loss
from megatron_splitkv.loss.fixed_point import (
    FIXED_POINT_SCALE,
    MAX_TOKEN_COUNT,
    check_token_count,
    fixed_point_loss,
    loggable,
)
from megatron_splitkv.loss.naive import (
    naive_dpace_weights,
    naive_draft_loss,
)
from megatron_splitkv.loss.report import drafter_report
from megatron_splitkv.loss.slots import IGNORED_PREDICTION, slot_decay, slot_weights

__all__ = [
    "FIXED_POINT_SCALE",
    "IGNORED_PREDICTION",
    "MAX_TOKEN_COUNT",
    "DraftLoss",
    "check_token_count",
    "chunked_draft_loss",
    "dpace_weights",
    "drafter_report",
    "fixed_point_loss",
    "loggable",
    "naive_dpace_weights",
    "naive_draft_loss",
    "slot_decay",
    "slot_weights",
]
