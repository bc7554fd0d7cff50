"""A tiny drafter, packs with every awkward property, and one training step on gloo ranks."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_splitkv.batch import get_batch_on_this_cp_rank
from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.plan import ContextPlan, build_plan, fitting_chunks
from megatron_splitkv.testing import gloo_pool

TINY = DFlashConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,  # odd: no even split over TP
    num_target_layers=4,
    target_layer_ids=(0, 2),
    mask_token_id=60,
    block_size=4,
    rope_theta=1e4,
    loss_decay_gamma=2.0,
    max_position_embeddings=64,
)
TINY_DOMINO = DominoConfig(
    **{field.name: getattr(TINY, field.name) for field in fields(TINY)},
    emb_dim=10,
    gru_hidden_dim=12,
)
TINY_DSPARK = DSparkConfig(
    **{field.name: getattr(TINY, field.name) for field in fields(TINY)}, markov_rank=10
)


@dataclass(frozen=True)
class Sample:
    """One packed micro-batch with its features and blocks, global."""

    pack: Pack
    layout: BlockLayout
    features: torch.Tensor
    strategy: str = "lpt"
    final_hidden: torch.Tensor | None = None

    def plan(self, cp_size: int, windows: Sequence[int | None] = (None,)) -> ContextPlan:
        length = len(self.features)
        return build_plan(
            self.layout,
            length,
            cp_size,
            strategy=self.strategy,
            chunks_per_rank=fitting_chunks(3, length, cp_size),
            windows=windows,
        )

    def batch(
        self, plan: ContextPlan, cp_rank: int, *, label_shift: int = 0, teacher: bool = False
    ) -> dict[str, torch.Tensor]:
        def read(ranges: np.ndarray) -> torch.Tensor:
            return torch.cat([self.features[:0], *(self.features[a:b] for a, b in ranges)])

        def read_final(ranges: np.ndarray) -> torch.Tensor:
            assert self.final_hidden is not None
            rows = self.final_hidden
            return torch.cat([rows[:0], *(rows[a:b] for a, b in ranges)])

        return get_batch_on_this_cp_rank(
            self.pack,
            plan,
            cp_rank,
            read,
            mask_token_id=TINY.mask_token_id,
            label_shift=label_shift,
            read_final_hidden=read_final if teacher else None,
        )


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Results of `fn(*args)` on that many ranks; their first call imports Megatron, slowly."""
    return gloo_pool(world_size).run(_without_rest, fn, *args)


def _without_rest(fn: Callable[..., Any], *args: Any) -> Any:
    """Call, then free what cycles hold: Megatron's process groups, whose threads would go on."""
    result = fn(*args)
    gc.collect()
    return result


def make_sample(
    lengths: Sequence[int],
    loss_mask: Any,
    *,
    anchors: Sequence[int] | None = None,
    num_anchors: int = 3,
    strategy: str = "lpt",
    seed: int = 0,
) -> Sample:
    """Random tokens and features; anchors are drawn unless given as packed positions."""
    generator = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.asarray(loss_mask, dtype=bool)
    pack = Pack(
        document_ids=np.arange(len(lengths)),
        cu_seqlens=bounds,
        token_ids=generator.integers(TINY.mask_token_id, size=int(bounds[-1])),
        loss_mask=mask,
    )
    if anchors is None:
        layout = select_anchors(
            mask,
            bounds,
            num_anchors=num_anchors,
            block_size=TINY.block_size,
            seed=seed,
            step=0,
            sample_ids=np.arange(len(lengths)),
        )
    else:
        at = np.asarray(anchors, dtype=np.int64)
        starts = bounds[np.searchsorted(bounds, at, side="right") - 1]
        layout = BlockLayout(at, starts, np.ones(at.size, dtype=bool), TINY.block_size)
    features = torch.from_numpy(
        generator.standard_normal((int(bounds[-1]), TINY.feature_width)).astype(np.float32)
    )
    final_hidden = generator.standard_normal((int(bounds[-1]), TINY.hidden_size))
    return Sample(pack, layout, features, strategy, torch.from_numpy(final_hidden).float())


def awkward_samples() -> list[Sample]:
    """Four packs: ordinary, weighing less than one, empty, and lopsided."""
    lengths = [7, 5, 2] * 10
    mask = np.random.default_rng(1).random(sum(lengths)) < 0.8
    mask[0:7] = [0, 0, 0, 0, 0, 1, 1]  # one candidate anchor, its block runs over the end
    mask[7:12] = [1, 0, 1, 0, 1]  # none
    mask[14:21] = True  # overlapping anchors
    ordinary = make_sample(lengths, mask, seed=1)

    light_mask = np.zeros(14, dtype=bool)
    light_mask[8] = True
    light = make_sample([9, 5], light_mask, anchors=[5], seed=2)  # slot 3 alone: weight e^-1

    empty = make_sample([7, 5, 2], np.zeros(14, dtype=bool), seed=3)

    # All supervision in the third of four documents: with contiguous chunks at cp 4 the other
    # ranks own no key that any query sees, and no block that is real.
    lopsided_mask = np.arange(40) // 10 == 2
    lopsided = make_sample([10] * 4, lopsided_mask, num_anchors=1, strategy="none", seed=4)
    return [ordinary, light, empty, lopsided]


@dataclass
class StepResult:
    """What one rank saw of one step; gradients and weights with TP shards joined."""

    loss: float
    count: float
    report: dict[str, list[float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


@contextmanager
def parallel_state(tp: int, cp: int) -> Iterator[None]:
    """Megatron's groups on this pool's ranks, with the CPU mode on; both undone afterwards."""
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    with cpu_mode():
        state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
        try:
            model_parallel_cuda_manual_seed(1234)
            yield
        finally:
            state.destroy_model_parallel()
            # Megatron forgets its groups without ending them: each keeps gloo threads alive.
            for group in set(groups) - before:
                dist.destroy_process_group(group)


def frozen_target(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (TINY.vocab_size, TINY.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.5


def build_model(
    tp: int, cp: int, *, dflash: DFlashConfig = TINY, model_args: Any = None, **overrides: Any
) -> Any:
    from megatron_splitkv.drafter import get_dflash_layer_spec
    from megatron_splitkv.drafter.kinds import model_class

    # What initial weights must not depend on.
    torch.manual_seed(dist.get_rank())
    torch.rand(dist.get_rank() + 1)
    config = dflash.to_transformer_config(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        init_method_std=0.2,
        **overrides,
    )
    embedding, head = frozen_target()
    arguments = {
        "layer_spec": get_dflash_layer_spec("local"),
        "embedding_weight": embedding,
        "head_weight": head,
        **(model_args or {}),
    }
    return model_class(dflash.kind)(config, dflash, **arguments).train()


def train_step(
    samples: Sequence[Sample],
    tp: int,
    cp: int,
    overrides: Mapping[str, Any] | None = None,
    overlap: bool = False,
    dflash: DFlashConfig = TINY,
) -> StepResult:
    """One step of Megatron's own schedule, DDP and gradient finalisation on this pool's ranks."""
    with parallel_state(tp, cp):
        model = build_model(tp, cp, dflash=dflash, **(overrides or {}))
        return run_schedule(data_parallel(model, overlap), samples)


def data_parallel(model: Any, overlap: bool = False) -> Any:
    """The model as Megatron wraps it, with Megatron's gradient finalisation."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    if model.config.bf16:
        model = Float16Module(model.config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(model.config, ddp_config, model)


def unwrapped(ddp: Any) -> Any:
    """The drafter inside DDP, and inside the 16-bit wrapper if there is one."""
    return getattr(ddp.module, "module", ddp.module)


def run_schedule(ddp: Any, samples: Sequence[Sample], *, gradients: bool = True) -> StepResult:
    """Forward and backward of a global batch; gradients stay in the model's buffers.

    A distributed optimizer leaves each rank whole sums of its own share of them only: then they
    are not to be returned.
    """
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = unwrapped(ddp)
    ddp.zero_grad_buffer()

    dp_rank, dp_size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    cp_rank, cp_size = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
    mine = list(samples[dp_rank::dp_size])

    def forward_step(iterator: Iterator[Sample], module: Any) -> Any:
        sample = next(iterator)
        plan = sample.plan(cp_size, model.dflash.windows)
        batch = sample.batch(
            plan,
            cp_rank,
            label_shift=model.dflash.label_shift,
            teacher=model.dflash.needs_final_hidden,
        )
        return module(batch, plan), lambda output: output

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=[ddp],
        num_microbatches=len(mine),
        seq_length=1,
        micro_batch_size=1,
    )
    group = state.get_data_parallel_group(with_context_parallel=True)
    summed = {name: torch.stack([r[name] for r in reports]).sum(0) for name in reports[0]}
    for pair in summed.values():
        dist.all_reduce(pair, group=group)
    numerator, count = summed["lm loss"].tolist()
    join = partial(join_tp, group=state.get_tensor_model_parallel_group())
    parameters = dict(model.named_parameters()) if gradients else {}
    return StepResult(
        loss=numerator / count,
        count=count,
        report={name: pair.tolist() for name, pair in summed.items()},
        gradients={
            name: join(p, p.main_grad, tolerance=_rounding(model)) for name, p in parameters.items()
        },
        weights={name: join(p, p.detach().clone()) for name, p in parameters.items()},
    )


def _rounding(model: Any) -> float:
    """By how much TP ranks may differ in a replicated gradient, relative to its largest number.

    Not at all, where all have equally long gradient buffers. With a vocabulary that TP does not
    divide they have not, and a ring all-reduce cuts them elsewhere: the same numbers of three or
    more ranks are then added in another order.
    """
    sizes = [p.vocab_size for p in model.parameters() if hasattr(p, "vocab_size")]
    return 1e-7 if any(size % model.tp_group.size() for size in sizes) else 0.0


def join_tp(
    parameter: Any, tensor: torch.Tensor, *, group: Any, tolerance: float = 0.0
) -> torch.Tensor:
    """Put TP shards together as one rank would hold them; replicated tensors must be equal."""
    shards: list[Any] = [None] * group.size()
    dist.all_gather_object(shards, tensor.contiguous(), group=group)  # shards may differ by a row
    if not getattr(parameter, "tensor_model_parallel", False):
        bound = tolerance * float(shards[0].abs().max())
        assert all(float((s - shards[0]).abs().max()) <= bound for s in shards), "TP ranks differ"
        return shards[0].clone()
    axis, stride = parameter.partition_dim, parameter.partition_stride
    pieces = [shard.chunk(stride, dim=axis) for shard in shards]
    return torch.cat([piece[s] for s in range(stride) for piece in pieces], dim=axis)
