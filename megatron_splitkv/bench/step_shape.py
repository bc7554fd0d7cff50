"""What `splitkv bench step` runs: one drafter layer, its micro-batch, and the ways to attend it.

All methods see the same documents, anchors, features and weights. Each gets the placement that
suits it: of context rows, and of draft blocks, as a launch deals them out or as published.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.choice import block_order_of
from megatron_splitkv.attention.strategies.volumes import TrafficShape, Volume, volume
from megatron_splitkv.comm.topology import split_by_node
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.pair_work import PairWork

DTYPES = ("bfloat16", "float32")
_PROMPT_FRACTION = 0.25  # of a sample, without supervision, as in the paper


@dataclass(frozen=True)
class Method:
    """A way to attend over ranks.

    Args:
        strategy: one of `config.CP_COMM_TYPES`.
        plan: placement of the context rows, one of `config.PLAN_STRATEGIES`.
        block_order: who owns which draft blocks, see `build_plan`.
        gather: see `SplitKVOptions`; peers project before and after.
        scatter: see `SplitKVOptions`.
    """

    strategy: str
    plan: str
    block_order: str = "contiguous"
    gather: str = "q"
    scatter: str = "heads"

    @property
    def name(self) -> str:
        """For tables and keys."""
        if self.strategy == "splitkv":
            return f"splitkv {self.gather}+{self.scatter}"
        return f"{self.strategy} balanced" if self.plan == "balanced" else self.strategy

    @property
    def offered(self) -> bool:
        """Whether a launch deals out draft blocks like that."""
        return self.block_order == block_order_of((self.strategy,))

    def options(self, ranks_per_node: int) -> SplitKVOptions:
        """For the layer; queries go to all ranks, as the formulas have it."""
        if self.strategy != "splitkv":
            return SplitKVOptions()
        return SplitKVOptions(
            gather=self.gather,
            scatter=self.scatter,
            query_cast="all",
            ranks_per_node=ranks_per_node,
        )

    @property
    def repeats(self) -> int:
        """Of query and output projection, those that every rank does for all rows."""
        return (self.gather == "hidden") + (self.scatter == "proj")


PAPER_PLACES = Method("splitkv", "balanced", gather="q", scatter="proj")
SPLITKV = (
    Method("splitkv", "balanced"),
    Method("splitkv", "balanced", gather="hidden", scatter="heads"),
    PAPER_PLACES,
    Method("splitkv", "balanced", gather="hidden", scatter="proj"),
)
# Peers as published, then with what a launch does for those that are not balanced by it. Work
# follows the owners of queries in all_gather and p2p, so blocks are dealt out mirrored; it follows
# the owners of keys in the forward of ringx and lv_xattn, which are published with contiguous rows.
# Ulysses splits heads: any placement is balanced, and contiguous rows need not be moved to it.
PEERS = (
    Method("a2a", "none"),
    Method("p2p", "zigzag", "mirrored"),
    Method("ringx", "none"),
    Method("lv_xattn", "none"),
    Method("all_gather", "none", "mirrored"),
    Method("p2p", "balanced", "mirrored"),
    Method("ringx", "balanced", "mirrored"),
    Method("lv_xattn", "balanced", "mirrored"),
)


@dataclass(frozen=True)
class StepShape:
    """One layer and one micro-batch.

    Args:
        drafter: name of a published drafter, see `DFlashConfig.preset`.
        shrink: divides its heads, key heads and head width; the hidden size by its square.
        context: S, context rows of all ranks.
        queries: Q, draft rows of all ranks.
        samples: documents that they are packed from, all alike.
        dtype: of activations and weights.
        seed: of anchors, features and weights.
        ranks_per_node: of the machine that it stands for; several nodes sum up on the way.

    Raises:
        ConfigError: sizes that do not divide.
    """

    drafter: str = "qwen3.5-35b-a3b"
    shrink: int = 4
    context: int = 32768
    queries: int = 1024
    samples: int = 1
    dtype: str = "bfloat16"
    seed: int = 0
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("shrink", "context", "queries", "samples", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} must not be negative")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not known; use {' or '.join(DTYPES)}")
        full = DFlashConfig.preset(self.drafter)
        for name, value, divisor in (
            ("attention heads", full.num_attention_heads, self.shrink),
            ("key-value heads", full.num_key_value_heads, self.shrink),
            ("head width", full.head_dim, 2 * self.shrink),
            ("hidden size", full.hidden_size, self.shrink**2),
        ):
            if value % divisor:
                raise ConfigError(
                    f"shrink {self.shrink} does not divide the {name} of {self.drafter}, {value}"
                )
        per_sample = self.block_size * self.samples
        if self.queries % per_sample or self.context % self.samples:
            raise ConfigError(
                f"{self.queries} queries and {self.context} context rows do not divide into "
                f"{self.samples} samples with blocks of {self.block_size}"
            )
        supervised = int(self.context // self.samples * (1 - _PROMPT_FRACTION))
        if self.queries // per_sample > supervised - 2:
            raise ConfigError(
                f"{self.queries} queries are {self.queries // per_sample} anchors a sample, which "
                f"has {supervised} supervised rows; take fewer queries or more context"
            )

    @property
    def block_size(self) -> int:
        """B, as published."""
        return DFlashConfig.preset(self.drafter).block_size

    @cached_property
    def dflash(self) -> DFlashConfig:
        """The drafter's one layer, as small as asked for."""
        full = DFlashConfig.preset(self.drafter)
        return replace(
            full,
            num_layers=1,
            layer_types=(),
            sliding_window=None,
            hidden_size=full.hidden_size // self.shrink**2,
            ffn_hidden_size=full.ffn_hidden_size // self.shrink**2,
            num_attention_heads=full.num_attention_heads // self.shrink,
            num_key_value_heads=full.num_key_value_heads // self.shrink,
            head_dim=full.head_dim // self.shrink,
            max_position_embeddings=max(full.max_position_embeddings, self.context),
        )

    @cached_property
    def layout(self) -> BlockLayout:
        """Draft blocks in the order of their documents and anchors."""
        length = self.context // self.samples
        loss_mask = np.arange(length) >= int(length * _PROMPT_FRACTION)
        return select_anchors(
            np.tile(loss_mask, self.samples),
            np.arange(self.samples + 1) * length,
            num_anchors=self.queries // self.block_size // self.samples,
            block_size=self.block_size,
            seed=self.seed,
            step=0,
            sample_ids=np.arange(self.samples),
        )

    def plan(self, method: Method, cp_size: int) -> ContextPlan:
        """The plan that suits a method."""
        return build_plan(
            self.layout,
            self.context,
            cp_size,
            strategy=method.plan,
            block_order=method.block_order,
        )

    def methods(self, cp_size: int) -> tuple[Method, ...]:
        """Those that can run; `a2a` needs heads for all ranks."""
        dealt = self.dflash.num_attention_heads % cp_size == 0
        return SPLITKV + tuple(m for m in PEERS if m.strategy != "a2a" or dealt)

    def volume(self, method: Method, plan: ContextPlan, rank: int) -> Volume:
        """What a rank sends by the formula, for queries that go to all ranks."""
        dflash = self.dflash
        itemsize = 2 if self.dtype == "bfloat16" else 4
        shape = TrafficShape(
            query_rows=plan.num_blocks * plan.block_size,
            context_rows=plan.context_length,
            cp_size=plan.cp_size,
            heads=dflash.num_attention_heads,
            kv_heads=dflash.num_key_value_heads,
            head_width=dflash.head_dim,
            itemsize=itemsize,
            shards=tuple(plan.num_rows(r) for r in range(plan.cp_size)),
            hidden_size=dflash.hidden_size,
            gather=method.gather,
            scatter=method.scatter,
            node_ranks=split_by_node(range(plan.cp_size), self.ranks_per_node),
        )
        return volume(method.strategy, shape, rank=rank)


def context_flops(shape: StepShape, plan: ContextPlan) -> float:
    """Of the whole drafter, what projects a rank's share of the context, forward and backward.

    The projection of the target's features has no gradient of its input, that of keys and values
    has both.
    """
    full = DFlashConfig.preset(shape.drafter)
    rows = plan.context_length / plan.cp_size
    draft_rows = plan.num_blocks * plan.block_size / plan.cp_size
    features = 4 * rows * full.feature_width * full.hidden_size
    width = 2 * full.num_key_value_heads * full.head_dim
    return features + 6 * (rows + draft_rows) * full.hidden_size * width


def repeated_flops(shape: StepShape, method: Method, plan: ContextPlan) -> float:
    """Of the whole drafter's layer, what a rank projects of other ranks' rows."""
    full = DFlashConfig.preset(shape.drafter)
    rows = plan.num_blocks * plan.block_size * (plan.cp_size - 1) / plan.cp_size
    width = full.num_attention_heads * full.head_dim
    return method.repeats * 6 * rows * full.hidden_size * width


def imbalance(method: Method, plan: ContextPlan) -> float:
    """Attention work of the slowest ranks over the mean, minus 1, where ranks wait for each other.

    They do so once a layer, but after every hop of `p2p` and `lv_xattn` and every turn of `ringx`.
    """
    work = PairWork.of_plan(plan)
    slowest = {
        "splitkv": work.key_owners,
        "a2a": work.total / plan.cp_size,
        "p2p": work.hops,
        "lv_xattn": work.hops,
        "all_gather": work.query_owners,
        # Two of seven products forward, where queries come in turn; five backward, where keys do.
        "ringx": (2 * work.query_turns + 5 * work.key_turns) / 7,
    }
    return slowest[method.strategy] / (work.total / plan.cp_size) - 1
