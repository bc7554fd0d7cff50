"""Stock Megatron layers with `SplitKVCoreAttention` equal one process with Megatron's attention.

One pool of eight ranks, one run: every case at every (tp, cp). Outputs, gradients of the inputs and
of all weights, with Megatron's rotary embedding in the order that Megatron deals rows out.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.plan import RowPlan, zigzag_positions
from megatron_splitkv.testing import gloo_pool, relative_error, subgroup
from tests.drafter.harness import parallel_state

HEADS, WIDTH = 4, 8
HIDDEN = HEADS * WIDTH
LAYOUTS = [(1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 3), (2, 4)]  # (tp, cp)


@dataclass(frozen=True)
class Case:
    """A layer and its inputs.

    Args:
        bounds: of the documents or, if all are equally long, samples of a batch.
        packed: documents as `PackedSeqParams`, else a batch.
        lengths: real rows of each packed document.
        shuffled: rows dealt out at random, with a plan of the user's.
        context: rows of the cross-attention's context for each sample; 0: no cross-attention.
        context_lengths: rows of it that are no padding; empty: no mask.
    """

    bounds: tuple[int, ...]
    groups: int = HEADS
    packed: bool = False
    lengths: tuple[int, ...] = ()
    shuffled: bool = False
    context: int = 0
    context_lengths: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    recompute: bool = False

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    @property
    def batch(self) -> int:
        return 1 if self.packed or self.shuffled else len(self.bounds) - 1

    @property
    def real(self) -> np.ndarray:
        """Which rows are no padding."""
        starts = np.array(self.bounds[:-1])
        lengths = self.lengths or np.diff(self.bounds)
        document = np.searchsorted(self.bounds, np.arange(self.rows), side="right") - 1
        return np.arange(self.rows) - starts[document] < np.array(lengths)[document]

    def positions(self, cp: int) -> np.ndarray:
        """Rows of each rank, int64[P, rows / P]; samples one after the other."""
        if self.shuffled:
            return np.random.default_rng(cp).permutation(self.rows).reshape(cp, -1)
        return zigzag_positions(self.bounds, cp)


CASES = {
    "causal": Case((0, 48)),
    "batch, grouped heads": Case((0, 48, 96), groups=2),
    "one key head": Case((0, 48), groups=1),
    "window": Case((0, 96), window=(5, 0)),
    "packed": Case((0, 48, 144, 192), groups=2, packed=True),
    "packed and padded": Case((0, 48, 144, 192), packed=True, lengths=(48, 70, 3)),
    "any order": Case((0, 29, 40, 48), shuffled=True),
    "cross": Case((0, 48), context=96),
    "cross, batch, padding mask": Case((0, 48, 96), context=72, context_lengths=(40, 71)),
    "recompute": Case((0, 48, 96), context=48, context_lengths=(48, 2), recompute=True),
}


def draw(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator)


def build_layer(case: Case, core: Any, tp: int, cp: int, groups: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec
    from megatron.core.transformer import TransformerConfig, build_module
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=case.groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=case.window,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        cp_comm_type="splitkv",
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity="selective" if case.recompute and cp > 1 else None,
        recompute_modules=["core_attn"],
    )
    spec = decoder_model_with_local_spec() if case.context else get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core
    if case.context:
        spec.submodules.cross_attention.submodules.core_attention = core
        spec.submodules.cross_attention.params["attn_mask_type"] = AttnMaskType.padding
    layer = build_module(spec, config=config, pg_collection=groups).train()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(shard(full_weight(name, parameter, tp), parameter, tp, groups.tp))
    return layer


def full_weight(name: str, parameter: torch.Tensor, tp: int) -> torch.Tensor:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp
    drawn = draw(name, *shape) * (0.2 if len(shape) > 1 else 0.1)
    return drawn + 1.0 if name.endswith("layernorm.weight") else drawn


def shard(full: torch.Tensor, parameter: Any, tp: int, group: dist.ProcessGroup) -> torch.Tensor:
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return full
    return full.chunk(tp, dim=parameter.partition_dim)[dist.get_rank(group)]


@dataclass
class Inputs:
    """Global inputs; hidden rows and gradients by position, samples one after the other."""

    hidden: torch.Tensor
    grad: torch.Tensor
    context: torch.Tensor | None
    rotary: torch.Tensor | None
    context_mask: torch.Tensor | None

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        samples = len(case.bounds) - 1
        hidden, context, mask = draw("hidden", case.rows, HIDDEN), None, None
        if case.context:
            context = draw("context", samples, case.context, HIDDEN)
            if case.context_lengths:
                ends = torch.tensor(case.context_lengths)[:, None]
                mask = torch.arange(case.context) >= ends  # True: hidden
        # Rotary angles by position within the document: as long as the longest.
        longest = int(np.diff(case.bounds).max())
        inverse = 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.arange(longest)[:, None] * torch.cat([inverse, inverse])
        rotary = None if case.context else angles[:, None, None]  # cross-attention would take it
        grad = draw("grad", case.rows, HIDDEN)
        return cls(hidden, grad * torch.from_numpy(case.real)[:, None], context, rotary, mask)


@dataclass
class Found:
    out: torch.Tensor
    grad_hidden: torch.Tensor
    grad_context: torch.Tensor | None
    weights: dict[str, torch.Tensor]


def by_sample(rows: torch.Tensor, batch: int) -> torch.Tensor:
    """``[b * s, h]`` -> ``[s, b, h]``."""
    return rows.unflatten(0, (batch, -1)).transpose(0, 1).contiguous()


def step(layer: Any, hidden: torch.Tensor, grad: torch.Tensor, batch: int, **kwargs: Any) -> Found:
    leaf = by_sample(hidden, batch).requires_grad_()
    context = kwargs.get("context")
    if context is not None:
        context = kwargs["context"] = context.transpose(0, 1).contiguous().requires_grad_()
    out, _ = layer(leaf, **kwargs)
    out.backward(by_sample(grad, batch))
    return Found(
        out=out.detach().transpose(0, 1).flatten(0, 1),
        grad_hidden=leaf.grad.transpose(0, 1).flatten(0, 1),
        grad_context=None if context is None else context.grad.transpose(0, 1),
        weights={name: p.grad.clone() for name, p in layer.named_parameters()},
    )


def one_process(case: Case) -> Found:
    """The same layer with Megatron's `DotProductAttention`, all rows in order."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    inputs = Inputs.of(case)
    layer = build_layer(
        case, DotProductAttention, 1, 1, ProcessGroupCollection.use_mpu_process_groups()
    )
    kwargs: dict[str, Any] = {"attention_mask": None}
    if case.packed or case.shuffled:  # which it cannot do: by a mask
        document = torch.from_numpy(np.searchsorted(case.bounds, np.arange(case.rows), "right"))
        same = document[:, None] == document
        kwargs["attention_mask"] = ~(same.tril())[None, None]
    if inputs.rotary is not None:
        starts = np.repeat(case.bounds[:-1], np.diff(case.bounds))
        place = torch.from_numpy(np.arange(case.rows) - starts)
        kwargs["rotary_pos_emb"] = inputs.rotary[place[: case.rows // case.batch]]
    if case.context:
        mask = inputs.context_mask
        kwargs["context"] = inputs.context
        kwargs["context_mask"] = None if mask is None else mask[:, None, None]
    return step(layer, inputs.hidden, inputs.grad, case.batch, **kwargs)


def this_rank(case: Case, tp: int, cp: int, groups: Any) -> dict[str, float]:
    """Errors of this rank's share against one process."""
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_splitkv.attention import SplitKVCoreAttention, SplitKVPackedSeqParams

    inputs, expected = Inputs.of(case), REFERENCES[case]
    rank = dist.get_rank(groups.cp)
    layer = build_layer(case, SplitKVCoreAttention, tp, cp, groups)
    positions = case.positions(cp)
    mine = torch.from_numpy(positions[rank])
    kwargs: dict[str, Any] = {"attention_mask": None}
    if case.packed:
        real = torch.tensor([0, *np.cumsum(case.lengths)] if case.lengths else case.bounds)
        padded = torch.tensor(case.bounds) if case.lengths else None
        kwargs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real.int(),
            cu_seqlens_kv=real.int(),
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )
        kwargs["rotary_pos_emb"] = inputs.rotary
    elif case.shuffled:
        plan = RowPlan.of_causal(positions, case.bounds)
        kwargs["packed_seq_params"] = SplitKVPackedSeqParams(plan=plan)
        document = np.searchsorted(case.bounds, positions[rank], side="right") - 1
        place = torch.from_numpy(positions[rank] - np.array(case.bounds)[document])
        kwargs["rotary_pos_emb"] = inputs.rotary[place]
    elif inputs.rotary is not None:
        kwargs["rotary_pos_emb"] = get_pos_emb_on_this_cp_rank(inputs.rotary, 0, groups.cp)
    keys = slice(rank * case.context // cp, (rank + 1) * case.context // cp)
    if case.context:
        kwargs["context"] = inputs.context[:, keys]
        mask = inputs.context_mask
        kwargs["context_mask"] = None if mask is None else mask[:, None, None, keys]
    found = step(layer, inputs.hidden[mine], inputs.grad[mine], case.batch, **kwargs)

    real = torch.from_numpy(case.real)[mine]
    errors = {
        "out": relative_error(found.out[real], expected.out[mine][real]),
        "grad hidden": relative_error(found.grad_hidden, expected.grad_hidden[mine]),
    }
    if case.context:
        share = expected.grad_context[:, keys]
        scale = share.norm() / expected.grad_context.norm()  # a rank may hold padding only
        difference = (found.grad_context - share).norm() / expected.grad_context.norm()
        errors["grad context"] = float(difference / scale.clamp(min=1e-3))
    parameters = dict(layer.named_parameters())
    for name, grad in found.weights.items():
        dist.all_reduce(grad, group=groups.cp)
        share = shard(expected.weights[name], parameters[name], tp, groups.tp)
        errors[f"grad {name}"] = relative_error(grad, share)
    return errors


@contextmanager
def layout(tp: int, cp: int) -> Iterator[Any]:
    """Groups of the first tp * cp ranks, also where that does not divide the pool; None: not in."""
    from megatron.core import parallel_state as state
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection()
    every = {
        "tp": [range(i * tp, (i + 1) * tp) for i in range(cp)],
        "cp": [range(i, tp * cp, tp) for i in range(tp)],
        "pp": [(i,) for i in range(size)],
    }
    for name, members in every.items():
        for ranks in members:
            group = subgroup(ranks)
            if rank in ranks:
                setattr(groups, name, group)
    if rank >= tp * cp:
        yield None
        return
    # Cross-attention takes its tensor parallelism from the globals, if these look complete.
    with (
        mock.patch.object(state, "_TENSOR_MODEL_PARALLEL_GROUP", groups.tp),
        mock.patch.object(state, "_PIPELINE_MODEL_PARALLEL_GROUP", groups.pp),
        mock.patch.object(state, "_DATA_PARALLEL_GROUP", groups.pp),
    ):
        yield groups


REFERENCES: dict[Case, Found] = {}


def solve_all(
    cases: Sequence[str], layouts: Sequence[tuple[int, int]], spoil: Callable[[], Any] | None = None
) -> dict[str, Any]:
    """On every rank: errors by (tp, cp, case), and what was warned of."""
    chosen = {name: CASES[name] for name in cases}
    with parallel_state(1, 1):
        REFERENCES.update({case: one_process(case) for case in chosen.values()})
    errors: dict[tuple[int, int, str], dict[str, float]] = {}
    with cpu_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tp, cp in layouts:
            with layout(tp, cp) as groups:
                if groups is not None:
                    for name, case in chosen.items():
                        errors[tp, cp, name] = this_rank(case, tp, cp, groups)
            dist.barrier()
    texts = [str(w.message) for w in caught if "splitkv" in str(w.message)]
    return {"errors": errors, "warnings": texts}


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    return gloo_pool(8).run(solve_all, list(CASES), LAYOUTS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_equals_one_process(answers: list[Any], tp: int, cp: int, name: str) -> None:
    for rank in range(tp * cp):
        errors = answers[rank]["errors"][tp, cp, name]
        assert len(errors) > 10
        for what, error in errors.items():
            assert error <= 1e-5, f"rank {rank}: {what} is off by {error:.1e}"


def test_many_queries_are_warned_of_once(answers: list[Any]) -> None:
    first, *others = [answer["warnings"] for answer in answers]
    assert len(first) == 1
    assert "query rows attend" in first[0]
    assert not any(others)
