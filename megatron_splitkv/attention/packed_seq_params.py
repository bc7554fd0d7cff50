"""The plan's way through Megatron's layers to the core attention."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_splitkv.plan import ContextPlan, RowPlan


@dataclass
class SplitKVPackedSeqParams(PackedSeqParams):
    """Megatron's packed-sequence parameters with the plan of the micro-batch.

    Megatron hands `packed_seq_params` from the model to every core attention, unread. Leave
    `qkv_format` at None: ``"thd"`` would switch on Megatron's own zigzag order and RoPE.

    Args:
        plan: the plan of the micro-batch, equal on all context-parallel ranks: of draft blocks, or
            of query rows and keys in an order of your own.
    """

    plan: ContextPlan | RowPlan | None = None
