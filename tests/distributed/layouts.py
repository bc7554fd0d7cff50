"""A few training steps at a parallel layout, through Megatron's own DDP, optimizer and schedule.

What a layout must not change is the run: losses, gradient norms, parameters. `table` prints how far
each layout strays from one process that takes all micro-batches itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_splitkv import compat
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.testing import relative_error
from tests.drafter.harness import (
    TINY,
    Sample,
    awkward_samples,
    build_model,
    join_tp,
    make_sample,
    on_ranks,
    parallel_state,
    run_schedule,
    unwrapped,
)

STEPS, PACKS = 3, 8
MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP = 0.1  # below every gradient norm of these steps: the clip is always taken

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@dataclass(frozen=True)
class Layout:
    """One way to spread a run over ranks; what TP and CP leave is data-parallel.

    Args:
        ranks: processes.
        tp: tensor-parallel size.
        cp: context-parallel size.
        distributed: split the optimizer over data and context parallelism.
        overlap: overlap gradient reduction, and with a distributed optimizer the gathering of
            parameters.
        bf16: train bf16 parameters with fp32 masters.
        model: overrides of the drafter's `TransformerConfig`.
    """

    ranks: int
    tp: int = 1
    cp: int = 1
    distributed: bool = False
    overlap: bool = False
    bf16: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"tp{self.tp} cp{self.cp} dp{self.ranks // (self.tp * self.cp)}"]
        parts += ["distributed optimizer"] * self.distributed
        parts += ["overlap"] * self.overlap
        parts += ["bf16"] * self.bf16
        if self.model:
            parts.append(f"{self.model['recompute_granularity']} recompute")
        return ", ".join(parts)


LAYOUTS = (
    Layout(8),
    Layout(8, cp=8),
    Layout(8, cp=2, distributed=True, overlap=True),
    Layout(8, tp=2, cp=2),
    Layout(8, tp=2, cp=2, distributed=True, overlap=True),
    Layout(8, tp=2, cp=4, distributed=True),
    Layout(8, tp=2, cp=1, overlap=True),
    Layout(8, tp=2, cp=2, model=FULL),
    Layout(8, cp=4, distributed=True, model=SELECTIVE),
    Layout(6, cp=3, overlap=True),
    Layout(6, tp=2, cp=3, distributed=True, model=FULL),
    Layout(8, cp=4, bf16=True),
    Layout(8, tp=2, cp=2, bf16=True, distributed=True, overlap=True),
)


@dataclass
class Run:
    """What one rank saw of a run; parameters with TP shards joined."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of a run from another one."""

    loss: float
    norm: float
    parameters: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.parameters)


def packs_of(step: int) -> list[Sample]:
    """The global batch of a step: eight packs, an empty and a lopsided one among them."""
    ordinary, light, empty, lopsided = awkward_samples()
    mask = np.random.default_rng(step).random(44) < 0.8
    others = [
        make_sample([21, 9, 14], mask, num_anchors=4, seed=100 * step + k) for k in range(PACKS - 4)
    ]
    return [ordinary, *others[:2], light, empty, *others[2:], lopsided]


class Trainer:
    """A drafter with all that Megatron puts around it, on this pool's ranks.

    Use it inside `trainer`, which makes the process groups.
    """

    # As the command line's default: Megatron's own can change the data-parallel size alone.
    sharding = "fully_reshardable"

    def __init__(self, layout: Layout, init_seed: int = 1234, drafter: DFlashConfig = TINY) -> None:
        from megatron.core.distributed import DistributedDataParallel as DDP
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        compat.mend_distributed_optimizer()
        self.layout = layout
        dtype = torch.bfloat16 if layout.bf16 else torch.float32
        precision = {"bf16": True, "params_dtype": dtype} if layout.bf16 else {}
        arguments = {"init_seed": init_seed}
        model = build_model(
            layout.tp,
            layout.cp,
            dflash=drafter,
            model_args=arguments,
            **precision,
            **layout.model,
        )
        config = model.config
        config.finalize_model_grads_func = finalize_model_grads
        self.ddp = DDP(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=layout.distributed,
                overlap_grad_reduce=layout.overlap,
                overlap_param_gather=layout.overlap and layout.distributed,
                bucket_size=4000,  # several buckets, as a large model has
            ),
            Float16Module(config, model) if layout.bf16 else model,
        )
        if layout.overlap:
            config.no_sync_func = self.ddp.no_sync
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-3,
                weight_decay=0.1,
                clip_grad=CLIP,
                bf16=layout.bf16,
                params_dtype=dtype,
                use_distributed_optimizer=layout.distributed,
                overlap_param_gather=layout.overlap and layout.distributed,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=5e-3,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=1,
            lr_decay_steps=4,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self._gathers_late = layout.overlap and layout.distributed

    def step(self, packs: Sequence[Sample]) -> tuple[float, float]:
        """Train on a global batch; returns its loss and the gradient norm before the clip."""
        self.optimizer.zero_grad()
        loss = run_schedule(self.ddp, packs, gradients=False).loss
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self.scheduler.step(increment=1)
        return loss, float(norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters of the model, TP shards joined."""
        from megatron.core import parallel_state as state

        if self._gathers_late:  # otherwise in the next forward pass
            self.ddp.start_param_sync(force_sync=True)
        group = state.get_tensor_model_parallel_group()
        return {
            name: join_tp(parameter, parameter.detach().float(), group=group)
            for name, parameter in unwrapped(self.ddp).named_parameters()
        }

    def sharded_state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """What a checkpoint holds of this rank, as Megatron's training writes it."""
        from megatron.core import parallel_state as state

        metadata = {
            "dp_cp_group": state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": self.sharding,
            "chained_optim_avoid_prefix": True,
        }
        model = unwrapped(self.ddp).sharded_state_dict(metadata=metadata)
        moments = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {
            "model": model,
            "optimizer": moments,
            "opt_param_scheduler": self.scheduler.state_dict(),
        }

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if self._gathers_late:
            self.ddp.start_param_sync(force_sync=True)
        dist_checkpointing.save(self.sharded_state(), path)
        # Its manager process would outlive ranks that the pool ends.
        filesystem_async._results_queue = None
        torch.distributed.barrier()

    def load(self, path: str) -> None:
        """Read a checkpoint, of whatever layout."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded_state(is_loading=True), path)
        unwrapped(self.ddp).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Masters and moments of every parameter, whole, and all step counts that there are."""
        from megatron.core import parallel_state as state

        group = state.get_tensor_model_parallel_group()
        whole: dict[str, torch.Tensor] = {}
        (optimizer,) = self.optimizer.chained_optimizers
        names = {p: name for name, p in unwrapped(self.ddp).named_parameters()}
        for parameter, name in names.items():
            for key, tensor in self._of(optimizer, parameter).items():
                whole[f"{name}/{key}"] = join_tp(parameter, tensor.clone(), group=group)
        steps = {float(s["step"]) for s in optimizer.optimizer.state.values()}
        return whole | {"steps": torch.tensor(sorted(steps))}

    def _of(self, optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
        if not self.layout.distributed:
            master = parameter.main_param if self.layout.bf16 else parameter
            moments = optimizer.optimizer.state[master]
            return {"master": master.detach()} | {key: moments[key] for key in MOMENTS}
        # Every rank's shares, put where they belong and summed.
        whole = {key: torch.zeros(parameter.numel()) for key in ("master", *MOMENTS)}
        if parameter in optimizer.model_param_group_index_map:
            group_index, group_order = optimizer.model_param_group_index_map[parameter]
            shard = optimizer.optimizer.param_groups[group_index]["params"][group_order]
            own = optimizer._get_model_param_range_map(parameter)["param"]
            tensors = {"master": shard.detach(), **optimizer.optimizer.state[shard]}
            for key, tensor in whole.items():
                tensor[own.start : own.end] = tensors[key]
        for tensor in whole.values():
            torch.distributed.all_reduce(tensor, group=optimizer.data_parallel_group)
        return {key: tensor.view(parameter.shape) for key, tensor in whole.items()}


@contextmanager
def trainer(
    layout: Layout, init_seed: int = 1234, drafter: DFlashConfig = TINY
) -> Iterator[Trainer]:
    """A `Trainer` with Megatron's groups around it."""
    with parallel_state(layout.tp, layout.cp):
        running = Trainer(layout, init_seed, drafter)
        try:
            yield running
        finally:
            # A distributed optimizer's shares are views of parameters and attributes of them: a
            # cycle that Python cannot see. It would keep all that the optimizer holds, down to the
            # threads of the process groups.
            for optimizer in running.optimizer.chained_optimizers:
                vars(optimizer).clear()


def train(layout: Layout) -> Run:
    """The run of `STEPS` steps on the ranks of this pool."""
    with trainer(layout) as running:
        steps = [running.step(packs_of(step)) for step in range(STEPS)]
        losses, norms = zip(*steps, strict=True)
        return Run(list(losses), list(norms), running.parameters())


def run_layouts(layouts: Sequence[Layout]) -> list[Run]:
    """The runs of several layouts, pool by pool; all ranks of a run must have seen the same."""
    runs: dict[int, Run] = {}
    for ranks in sorted({layout.ranks for layout in layouts}, reverse=True):
        chosen = [i for i, layout in enumerate(layouts) if layout.ranks == ranks]
        for i in chosen:
            first, *others = on_ranks(ranks, train, layouts[i])
            assert all(difference(other, first).worst == 0.0 for other in others), layouts[i]
            runs[i] = first
    return [runs[i] for i in range(len(layouts))]


def difference(run: Run, reference: Run) -> Difference:
    """How far a run is from another, relative to the other."""

    def largest(found: Sequence[float], expected: Sequence[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))

    assert run.parameters.keys() == reference.parameters.keys()
    return Difference(
        largest(run.losses, reference.losses),
        largest(run.norms, reference.norms),
        max(relative_error(p, reference.parameters[n]) for n, p in run.parameters.items()),
    )


def compare(layouts: Sequence[Layout] = LAYOUTS) -> list[tuple[Layout, Difference]]:
    """Every layout against one process of the same precision."""
    alone = {layout.bf16: Layout(1, bf16=layout.bf16) for layout in layouts}
    references = dict(zip(alone, run_layouts(list(alone.values())), strict=True))
    runs = run_layouts(layouts)
    return [
        (layout, difference(run, references[layout.bf16]))
        for layout, run in zip(layouts, runs, strict=True)
    ]


def table(differences: Sequence[tuple[Layout, Difference]]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        f"| layout | loss of {STEPS} steps | gradient norm | parameters after {STEPS} steps |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {layout} | {d.loss:.1e} | {d.norm:.1e} | {d.parameters:.1e} |"
        for layout, d in differences
    ]
    return "\n".join(lines)
