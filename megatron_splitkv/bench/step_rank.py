"""One rank's part of `splitkv bench step`: the drafter's attention layer under one method.

The layer is the drafter's own: the projection of the target's features, which are data, and one
attention with its projections. Functions here run on every rank of a group, `prepare` first.
"""

import gc
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.bench.step_shape import Method, StepShape
from megatron_splitkv.comm import mark
from megatron_splitkv.comm.virtual_clock import Moment, VirtualClock
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.testing.live_storages import LiveStorages

CONTEXT = "context"  # the phase that grows with the context under every method
ATTENTION = "attention"
_NOISE_ROWS = 2039  # a prime: features and draft rows repeat, but for their positions


@dataclass(frozen=True)
class RankStep:
    """What one rank saw of one step.

    Args:
        moments: its timeline, see `VirtualClock`.
        cpu_seconds: of all its threads.
        wall_seconds: from a barrier to its end.
        bytes: that it sent.
        calls: collectives.
    """

    moments: list[Moment]
    cpu_seconds: float
    wall_seconds: float
    bytes: float
    calls: int

    def seconds(self, phase: str) -> float:
        """By its own clock, waits included where that clock runs on."""
        total, current, before = 0.0, "", self.moments[0].at
        for moment in self.moments:
            total += (moment.at - before) * (current == phase)
            before = moment.at
            current = moment.label if moment.kind == "phase" else current
        return total


def prepare(shape: StepShape) -> None:
    """Make Megatron's groups, if need be, and the layer's weights; all ranks are one CP group."""
    import_quietly()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_splitkv.cpu import enable_cpu_mode

    enable_cpu_mode()  # nothing where there is a GPU
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        model_parallel_cuda_manual_seed(shape.seed + 1)
    _attention.cache_clear()
    _context_projection.cache_clear()
    _context_projection(shape)
    gc.freeze()  # of what has been imported there is much, and every step collects


def run_step(shape: StepShape, method: Method, real_time: bool) -> RankStep:
    """Forward and backward of the layer.

    Args:
        shape: as in `prepare`.
        method: how to attend.
        real_time: the timeline shows seconds that passed, on the device, instead of CPU-seconds.
    """
    step = Step(shape, method)
    device_times = _DeviceTimes() if real_time and torch.cuda.is_available() else None
    now: Callable[[], float] = time.perf_counter if real_time else time.thread_time
    clock = VirtualClock(now=device_times or now)
    gc.collect()
    gc.disable()  # a collection would hit one method and not the next
    try:
        _barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        with clock:
            step.run(step.project_context())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    moments = clock.moments if device_times is None else device_times.resolve(clock.moments)
    return RankStep(moments, cpu, wall, clock.bytes(), clock.calls())


def inspect_step(shape: StepShape, method: Method) -> tuple[int, NDArray[np.float32]]:
    """Peak bytes of live tensors of the attention, its inputs and weights aside, and its output.

    What projects the features is before it; keys and values are part of it.

    Shape:
        float32[Q_p, d], own rows.
    """
    step = Step(shape, method)
    context = step.project_context().detach().requires_grad_()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = step.run(context)
        return torch.cuda.max_memory_allocated() - before, out.cpu().numpy()
    with LiveStorages() as memory:
        memory.ignore(context, *step.inputs, *step.parameters)
        out = step.run(context)
    return memory.peak, out.numpy()


class Step:
    """Inputs of one method on this rank: the same by global row and block, whatever the plan."""

    def __init__(self, shape: StepShape, method: Method) -> None:
        from megatron_splitkv.attention import SplitKVPackedSeqParams
        from megatron_splitkv.drafter.rope import rotary_cos_sin

        self.plan = _plan(shape, method, dist.get_world_size())
        self.project = _context_projection(shape)
        self.attention = _attention(shape, method)
        device, dtype = self.project[0].weight.device, self.project[0].weight.dtype
        rank, dflash = dist.get_rank(), shape.dflash
        rows, blocks = self.plan.rows(rank), self.plan.blocks(rank)
        slots = np.arange(self.plan.block_size)
        anchors = self.plan.layout.anchor_positions[blocks]
        draft_rows = (anchors[:, None] + slots).ravel()
        self.features = _noise(rows, dflash.feature_width, shape.seed).to(device, dtype)[:, None]
        hidden = _noise(draft_rows, dflash.hidden_size, shape.seed + 1).to(device, dtype)
        self.hidden = hidden[:, None].requires_grad_()
        self.grad_out = _noise(draft_rows, dflash.hidden_size, shape.seed + 2).to(device, dtype)
        length = shape.context // shape.samples
        of_all = self.plan.block_positions()
        own = of_all.reshape(-1, self.plan.block_size)[blocks].ravel()
        positions = [rows % length, own] + [of_all] * (method.gather == "hidden")
        at = torch.from_numpy(np.concatenate(positions)).to(device)
        self.rotary = rotary_cos_sin(at, dflash.head_dim, dflash.rope_theta)
        self.packed = SplitKVPackedSeqParams(plan=self.plan)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.features, self.hidden, self.grad_out, self.rotary]

    @property
    def parameters(self) -> list[torch.Tensor]:
        modules = (*self.project, self.attention)
        return [parameter for module in modules for parameter in module.parameters()]

    def project_context(self) -> torch.Tensor:
        """The context rows that keys and values are projected from."""
        for parameter in self.parameters:
            parameter.grad = None
        fc, norm = self.project
        mark("phase", CONTEXT)
        (context,) = _leave(norm(fc(self.features)[0]))
        return context

    def run(self, context: torch.Tensor) -> torch.Tensor:
        """Attention forward, and all backward; the output."""
        self.hidden.grad = None
        out, _ = self.attention(self.hidden, context, self.rotary, self.packed)
        out.backward(self.grad_out[:, None])
        return out.detach()[:, 0].float()


@lru_cache(maxsize=16)
def _plan(shape: StepShape, method: Method, cp_size: int) -> ContextPlan:
    return shape.plan(method, cp_size)


def _noise(rows: np.ndarray, width: int, seed: int) -> torch.Tensor:
    return _noise_table(width, seed).index_select(0, torch.from_numpy(rows % _NOISE_ROWS))


@lru_cache(maxsize=4)
def _noise_table(width: int, seed: int) -> torch.Tensor:
    return torch.randn(_NOISE_ROWS, width, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def _context_projection(shape: StepShape) -> tuple[Any, Any]:
    """The projection of the features and its norm."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_splitkv.drafter.feature_projection import FeatureProjection

    config, spec = _megatron(shape, "splitkv"), _spec(shape, Method("splitkv", "none"))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(shape.seed)
    fc = FeatureProjection(
        shape.dflash.feature_width,
        config.hidden_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=True,
        tp_group=groups.tp,
    )
    norm = spec.submodules.input_layernorm(
        config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
    )
    dtype = config.params_dtype
    return fc.to(dtype), norm.to(dtype)


@lru_cache(maxsize=16)
def _attention(shape: StepShape, method: Method) -> Any:
    """The drafter's attention; the same weights for every method."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(shape.seed)
    attention = build_module(
        _spec(shape, method).submodules.self_attention,
        config=_megatron(shape, method.strategy),
        layer_number=1,
        cp_comm_type=method.strategy,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    project_keys = attention._keys

    def marked_keys(context: torch.Tensor, blocks: torch.Tensor, *rotary: Any) -> Any:
        return _leave(*project_keys(*_enter(context, blocks), *rotary))

    attention._keys = marked_keys  # what the drafter overlaps with its queries' way
    return attention.to(attention.config.params_dtype).train()


def _spec(shape: StepShape, method: Method) -> Any:
    from megatron_splitkv.drafter import get_dflash_layer_spec

    return get_dflash_layer_spec("local", splitkv=method.options(shape.ranks_per_node))


def _megatron(shape: StepShape, strategy: str) -> Any:
    on_cpu = not torch.cuda.is_available()
    low = shape.dtype == "bfloat16"
    return shape.dflash.to_transformer_config(
        context_parallel_size=dist.get_world_size(),
        cp_comm_type=strategy,
        use_cpu_initialization=on_cpu,
        bias_dropout_fusion=False,
        bf16=low,
        params_dtype=torch.bfloat16 if low else torch.float32,
    )


def import_quietly() -> None:
    """Import Megatron without remarks, once for every rank, on what is not installed."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    import megatron_splitkv.drafter.specs  # noqa: F401


def _barrier() -> None:
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Phases: computation between `_enter` and `_leave` belongs to the context, backward too.


def _enter(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _Boundary.apply(CONTEXT, ATTENTION, *tensors)


def _leave(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _Boundary.apply(ATTENTION, CONTEXT, *tensors)


class _Boundary(torch.autograd.Function):
    """Identity that says which phase begins, in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, after: str, before: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.before = before
        mark("phase", after)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        mark("phase", ctx.before)
        return None, None, *grads


class _DeviceTimes:
    """A clock of CUDA events: readings are numbers of events until `resolve`."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def __call__(self) -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        return float(len(self._events) - 1)

    def resolve(self, moments: list[Moment]) -> list[Moment]:
        """The moments in seconds since the first; after a synchronisation."""
        seconds = [1e-3 * self._events[0].elapsed_time(event) for event in self._events]
        return [replace(moment, at=seconds[int(moment.at)]) for moment in moments]
