"""One training step of a small drafter on a gloo rank, its CPU-seconds by phase.

Runs in the ranks of a pool: `prepare` once, then `step` as often as wanted.
"""

import gc
import logging
import os
import time
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.batch import get_batch_on_this_cp_rank
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.plan import ContextPlan, build_plan

PHASES = ("plan", "forward", "backward")
_VOCABULARY = 512
_MOST_RANKS = 64
_RANK_BYTES = 1 << 28  # of Python, torch and Megatron


@dataclass(frozen=True)
class BalanceShape:
    """The drafter and its micro-batches: the paper's proportions, smaller.

    As in its 35B-A3B setting, heads together are twice as wide as the hidden state, attention to a
    context row costs about eight times its projections, which all ranks do alike, and a quarter of
    each sample is unsupervised. One sample on 2 and 4 ranks is what its four are on 8 and 16.

    Args:
        ranks: numbers of processes to train on.
        repeats: timed steps of each strategy.
        samples: packed documents.
        context: tokens of each.
        anchors: draft blocks of each.
        block_size: B.
        layers: of the drafter.
        hidden_size: d, a multiple of 128.
        chunks_per_rank: J, None by rule.
        seed: of anchors and weights.
    """

    ranks: tuple[int, ...] = (2, 4)
    repeats: int = 6
    samples: int = 1
    context: int = 32768
    anchors: int = 256
    block_size: int = 16
    layers: int = 1
    hidden_size: int = 128
    chunks_per_rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or max(self.ranks) > _MOST_RANKS:
            raise ConfigError(f"ranks {list(self.ranks)} must be at least 1, at most {_MOST_RANKS}")
        if self.repeats < 2:
            raise ConfigError(f"repeats {self.repeats} must be at least 2: an interval needs them")
        for name in ("samples", "context", "anchors", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.hidden_size < 128 or self.hidden_size % 128:
            raise ConfigError(f"hidden_size {self.hidden_size} must be a multiple of 128")
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError(f"seed {self.seed} must not be negative, and below 2**31")
        if self.chunks_per_rank is not None and self.chunks_per_rank < 1:
            raise ConfigError(f"chunks_per_rank {self.chunks_per_rank} must be at least 1")
        if self.context - self.context // 4 < 2:
            raise ConfigError(
                f"context {self.context} leaves no anchor and no work; an anchor and the token "
                "behind it must be supervised, so take at least 2"
            )
        rows, most_ranks = self.samples * self.context, max(self.ranks)
        if rows // most_ranks < (self.chunks_per_rank or 1):
            raise ConfigError(
                f"{rows:,} context rows are too few for {most_ranks} ranks of chunks_per_rank "
                f"{self.chunks_per_rank or 1}; take more context, or fewer ranks or chunks"
            )
        # What no drafter can have is refused by its configuration.
        needed, there = self.memory(most_ranks), psutil.virtual_memory().total
        if needed > there:
            raise ConfigError(
                f"{most_ranks} ranks need about {needed / 1e9:,.0f} GB together, and this machine "
                f"has {there / 1e9:,.0f}; take fewer ranks, samples, anchors or layers, less "
                "context, or a smaller block_size or hidden_size"
            )

    def memory(self, cp_size: int) -> int:
        """Bytes that so many ranks need together, roughly and rather too few."""
        dflash, rows = self.dflash, self.samples * self.context
        queries = self.samples * min(self.anchors, self.context) * self.block_size
        projected = dflash.hidden_size + 2 * dflash.num_key_value_heads * dflash.head_dim
        context_row = dflash.feature_width + self.layers * projected
        query_row = 2 * self.layers * dflash.num_attention_heads * dflash.head_dim
        # Parameters, gradients and their copy; every rank reads the pack and sees all queries.
        a_rank = _RANK_BYTES + 12 * dflash.num_parameters() + 9 * rows + 4 * queries * query_row
        return cp_size * a_rank + 2 * 4 * rows * context_row

    @property
    def dflash(self) -> DFlashConfig:
        """The drafter."""
        return DFlashConfig(
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=2 * self.hidden_size,
            num_attention_heads=self.hidden_size // 32,
            num_key_value_heads=self.hidden_size // 128,
            head_dim=64,
            vocab_size=_VOCABULARY,
            num_target_layers=8,
            target_layer_ids=(1, 3, 5, 7),
            mask_token_id=_VOCABULARY - 1,
            block_size=self.block_size,
            max_position_embeddings=self.context,
        )

    def pack(self) -> Pack:
        """Documents of random tokens."""
        length = self.samples * self.context
        return Pack(
            document_ids=np.arange(self.samples),
            cu_seqlens=np.arange(self.samples + 1) * self.context,
            token_ids=np.random.default_rng(self.seed).integers(_VOCABULARY - 1, size=length),
            loss_mask=np.tile(np.arange(self.context) >= self.context // 4, self.samples),
        )

    def layout(self, number: int) -> BlockLayout:
        """Draft blocks of a step."""
        pack = self.pack()
        return select_anchors(
            pack.loss_mask,
            pack.cu_seqlens,
            num_anchors=min(self.anchors, self.context),
            block_size=self.block_size,
            seed=self.seed,
            step=number,
            sample_ids=pack.document_ids,
        ).without_padding()

    def plan(self, layout: BlockLayout, cp_size: int, strategy: str) -> ContextPlan:
        """The plan of a step."""
        return build_plan(
            layout,
            self.samples * self.context,
            cp_size,
            strategy=strategy,
            chunks_per_rank=self.chunks_per_rank,
        )


def prepare(shape: BalanceShape) -> None:
    """Make Megatron's groups and the drafter on this rank; the pool's ranks are one CP group.

    Args:
        shape: what is trained.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a benchmark of CPU ranks, wherever it runs
    # Of what is not installed and not needed, once a rank.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_splitkv.cpu import enable_cpu_mode

    enable_cpu_mode()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(shape.seed + 1)
    _drafter(shape)
    gc.collect()
    gc.freeze()  # Megatron is large: looking through it before every step would take longer than it


@lru_cache(maxsize=1)
def _drafter(shape: BalanceShape) -> Any:
    from megatron_splitkv.drafter import DFlashModel, get_dflash_layer_spec

    config = shape.dflash.to_transformer_config(
        context_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
    )
    generator = torch.Generator().manual_seed(shape.seed)
    return DFlashModel(
        config,
        shape.dflash,
        layer_spec=get_dflash_layer_spec("local"),
        embedding_weight=torch.randn(_VOCABULARY, shape.hidden_size, generator=generator),
        head_weight=None,
    ).train()


def step(shape: BalanceShape, number: int, strategy: str) -> tuple[NDArray[np.float64], float]:
    """Plan, forward, backward and the sum of the gradients over ranks.

    The batch is there before the clock starts, for all strategies alike: a data loader's work.

    Args:
        shape: what is trained, as in `prepare`.
        number: of the step; draws its anchors.
        strategy: of the plan.

    Returns:
        This rank's CPU-seconds by `PHASES`, all threads; and the wall seconds of the step.

    Shape:
        float64[3].
    """
    model, layout = _drafter(shape), shape.layout(number)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    before = shape.plan(layout, ranks, strategy)
    generator = torch.Generator().manual_seed(shape.seed + rank)

    def read_features(ranges: NDArray[np.int64]) -> torch.Tensor:
        rows = int((ranges[:, 1] - ranges[:, 0]).sum())
        return torch.randn(rows, shape.dflash.feature_width, generator=generator)

    batch = get_batch_on_this_cp_rank(
        shape.pack(), before, rank, read_features, mask_token_id=shape.dflash.mask_token_id
    )
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    gc.disable()  # a collection would hit one strategy and not the next
    try:
        dist.barrier()
        begin, marks = time.perf_counter(), [time.process_time()]
        plan = shape.plan(layout, ranks, strategy)
        marks.append(time.process_time())
        loss, _, _ = model(batch, plan)
        marks.append(time.process_time())
        loss.backward()  # Megatron divides by the token count afterwards
        gradients = torch.cat([p.grad.ravel() for p in parameters if p.grad is not None])
        dist.all_reduce(gradients)
        marks.append(time.process_time())
        wall = time.perf_counter() - begin
    finally:
        gc.enable()
    return np.diff(marks), wall
