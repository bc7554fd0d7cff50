"""Every peer of split-KV equals one process: outputs and all gradients, at every group size."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils import deterministic

from megatron_splitkv.attention import split_context_parallel_attention
from megatron_splitkv.attention.strategies import (
    all_gather,
    lv_xattn,
    region,
    ring,
    ringx,
    ulysses,
)
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.testing import (
    gloo_pool,
    reference_attention,
    relative_error,
    subgroup,
)
from tests.distributed import test_attention_cases as splitkv_cases
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    own_slice,
    shard_keys,
    solve,
)

PEERS = CP_COMM_TYPES[1:]
# Odd lengths; overlapping and equal anchors; an anchor at a document's start, which sees only its
# own block; a document without anchors, one with a single candidate; padding blocks; a tail.
MIXED = Problem(
    document_lengths=(37, 7, 5, 2, 1, 68, 11),
    anchors=(
        (3, 5, 6, 6, 19, 36),
        (0, 6),
        (2, None, None),
        (None, None),
        (0,),
        (1, 9, 11, 20, 33, 34, 35, 50, 63, 67),
        (),
    ),
    tail_rows=3,
)
# For Ulysses, by group size: query heads, and key heads of which a rank has several or one, or
# which two or more ranks share.
ULYSSES_HEADS = {
    **{1: (4, (2,)), 2: (4, (4, 2, 1)), 3: (6, (6, 3, 1)), 4: (8, (8, 4, 2, 1)), 5: (5, (5, 1))},
    **{6: (12, (3, 2)), 7: (7, (1,)), 8: (8, (4, 1))},
}

Case = tuple[Problem, int]


def cases_of(problem: Problem, *cp_sizes: int) -> list[Case]:
    """The problem at each group size, with heads that its strategy can deal out."""
    cases = []
    for cp_size in cp_sizes:
        heads, key_heads = ULYSSES_HEADS[cp_size]
        if problem.comm == "a2a":
            for n in key_heads:
                cases.append((replace(problem, num_heads=heads, num_key_heads=n), cp_size))
        else:
            cases.append((problem, cp_size))
    return cases


def solve_all(cases: list[Case]) -> list[Any]:
    return [solve(problem, cp_size) for problem, cp_size in cases]


def found_and_expected(
    cases: list[Case], ranks: int = 4, solver: Callable[..., Any] = solve_all, *args: Any
) -> Iterator[tuple[Problem, int, list[torch.Tensor], list[torch.Tensor]]]:
    """Global results of all cases and the fp64 truth, from one call of the pool."""
    shares = gloo_pool(ranks).run(solver, cases, *args)
    for i, (problem, cp_size) in enumerate(cases):
        plan = problem.plan(cp_size)
        found = assemble(plan, [shares[rank][i] for rank in range(cp_size)])
        assert [x.dtype for x in found] == [problem.dtype] * 4
        yield problem, cp_size, found, attend_global(problem, plan, problem.tensors(plan))


def describe(problem: Problem, cp_size: int, name: str, error: float) -> str:
    heads = f"{problem.num_heads}/{problem.num_key_heads}"
    return f"{problem.comm}, cp {cp_size}, {heads} heads: {name} is off by {error:.2e}"


def assert_within(cases: list[Case], bound: float, ranks: int = 4) -> None:
    for problem, cp_size, found, expected in found_and_expected(cases, ranks):
        for name, a, b in zip(NAMES, found, expected, strict=True):
            error = relative_error(a, b)
            assert error <= bound, describe(problem, cp_size, name, error)


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("comm", PEERS)
def test_fp64_equals_one_process(comm: str, kernel: str) -> None:
    problem = replace(MIXED, comm=comm, kernel=kernel)
    plans = [replace(problem, strategy=strategy) for strategy in ("none", "zigzag", "balanced")]
    assert_within([case for p in plans for case in cases_of(p, 1, 2, 3, 4)], 1e-12)


@pytest.mark.parametrize("comm", PEERS)
def test_fp32_error_is_fp32_noise(comm: str) -> None:
    # Also where a dq buffer that is used again would show: no dtype changes on the way.
    problem = replace(MIXED, comm=comm, dtype=torch.float32)
    kernels = [replace(problem, kernel=kernel) for kernel in ("naive", "cpu")]
    assert_within([case for p in kernels for case in cases_of(p, 2, 3, 4)], 1.5e-6)


def test_five_to_eight_ranks() -> None:
    cases = [
        case
        for comm in PEERS
        for case in cases_of(replace(MIXED, comm=comm, dtype=torch.float32), 5, 6, 7, 8)
    ]
    assert_within(cases, 1.5e-6, ranks=8)


@pytest.mark.parametrize("comm", PEERS)
def test_bf16_error_is_within_twice_one_process(comm: str) -> None:
    problem = replace(MIXED, comm=comm, dtype=torch.bfloat16)
    cases = cases_of(problem, 2, 4) + cases_of(replace(problem, kernel="naive"), 3)
    for p, cp_size, found, expected in found_and_expected(cases):
        plan = p.plan(cp_size)
        dense = attend_global(p, plan, p.tensors(plan), dense=True)
        for name, a, b, c in zip(NAMES, found, expected, dense, strict=True):
            error = relative_error(a, b)
            assert error <= 2 * relative_error(c, b), describe(p, cp_size, name, error)


@pytest.mark.parametrize("comm", PEERS)
def test_windows_strides_and_head_groupings(comm: str) -> None:
    problem = replace(MIXED, comm=comm)
    variants = [
        replace(problem, window=1),
        replace(problem, window=6, kernel="naive"),
        replace(problem, window=20, strided=True),
        replace(problem, strided=True, kernel="naive"),
        replace(problem, strided=True, strategy="none"),
    ]
    cases = [case for variant in variants for case in cases_of(variant, 2, 3)]
    if comm != "a2a":  # those of Ulysses are many already
        grouped = [replace(problem, num_heads=6, num_key_heads=n) for n in (6, 3, 1)]
        cases += [(variant, 4) for variant in grouped]
    assert_within(cases, 1e-12)


EMPTY = {
    "no blocks": Problem(document_lengths=(40,), anchors=((),)),
    "padding only": Problem(document_lengths=(40,), anchors=((None, None, None),)),
    "fewer rows than ranks": Problem(
        document_lengths=(3,), anchors=((1, 2),), strategy="none", chunks_per_rank=1
    ),
    "padding first": Problem(document_lengths=(40,), anchors=((None, 30, None, None, 7),)),
    "one rank's context": Problem(
        document_lengths=(64,), anchors=((10,),), strategy="none", chunks_per_rank=1
    ),
}


@pytest.mark.parametrize("comm", PEERS)
def test_empty_shards(comm: str) -> None:
    plan = EMPTY["fewer rows than ranks"].plan(4)
    assert [plan.num_rows(rank) for rank in range(4)].count(0) == 1
    problems = [replace(problem, comm=comm) for problem in EMPTY.values()]
    assert_within([case for problem in problems for case in cases_of(problem, 3, 4)], 1e-12)


# Faults of the authors' code of these strategies, each of which a tolerance of 1e-2 may hide.


@pytest.mark.parametrize("comm", PEERS)
def test_scores_far_above_88_neither_overflow_nor_vanish(comm: str) -> None:
    problem = Problem(
        document_lengths=(40,),
        anchors=((30, 7, 18),),
        comm=comm,
        dtype=torch.float32,
        score_scale=500.0,
    )
    plan = problem.plan(3)
    _, lse = reference_attention(*problem.tensors(plan)[:3], plan.layout)
    assert float(lse.max()) > 1000
    # fp32 scores of 1000 are off by 1e-4 before the softmax sees them.
    assert_within(cases_of(problem, 2, 3), 1e-3)


def seeded_with_zero(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The running lse of LV-XAttn's code: one key too many, with score 0 and value 0."""
    out, lse = region.nothing_attended(rows)
    return out, torch.zeros_like(lse)


def with_local_lse(self: Any, grad_out: Any, *meeting: Any) -> Any:
    """Backward from what one rank's keys alone make of the softmax."""
    rows, k, v, carrier, _, staircase = meeting
    partial = self.attend(rows, k, v, staircase)
    lse = region.nothing_attended(rows)[1] if partial is None else partial[1]
    return RIGHT_GRADIENTS(self, grad_out, rows, k, v, carrier, lse, staircase)


def without_delta(self: Any, grad_out: Any, *meeting: Any) -> Any:
    rows, k, v, carrier, lse, staircase = meeting
    zeros = torch.zeros_like(carrier)
    return RIGHT_GRADIENTS(self, grad_out, rows, k, v, zeros, lse, staircase)


def overwriting(sums: Any, partial: Any) -> None:
    """One buffer for every hop's dq: what came before is lost."""
    sums = list(sums)
    sums[0].zero_()
    region.add_(sums, partial)


RIGHT_GRADIENTS = region.PeerStrategy.gradients
MODULES = {"p2p": ring, "lv_xattn": lv_xattn, "ringx": ringx, "all_gather": all_gather} | {
    "a2a": ulysses
}
FAULTS = {
    "merge seeded with 0": (None, "nothing_attended", seeded_with_zero),
    "local lse in backward": (region.PeerStrategy, "gradients", with_local_lse),
    "missing delta": (region.PeerStrategy, "gradients", without_delta),
    "dq buffer used again": (None, "add_", overwriting),
}


def solve_with_fault(cases: list[Case], fault: str) -> list[Any]:
    owner, name, wrong = FAULTS[fault]
    shares = []
    for problem, cp_size in cases:
        with mock.patch.object(owner or MODULES[problem.comm], name, wrong):
            shares.append(solve(problem, cp_size))
    return shares


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str) -> None:
    problem = Problem(
        document_lengths=(40,), anchors=((30, 7, 18, 22),), dtype=torch.float32, num_heads=6
    )
    cases = [(replace(problem, comm=comm, num_key_heads=3), 3) for comm in PEERS]
    for p, cp_size, found, expected in found_and_expected(cases, 4, solve_with_fault, fault):
        worst = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
        assert worst > 1e-2, describe(p, cp_size, fault, worst)


def solve_with_stale_buffer(cases: list[Case], label: str) -> list[Any]:
    """The last hop hands out what it sent: the other one of two buffers that take turns."""
    hops = 0

    def shift(x: torch.Tensor, group: Any, **options: Any) -> Any:
        nonlocal hops
        pending = RIGHT_SHIFT(x, group, **options)
        hops += options["label"] == label
        if options["label"] == label and hops == group.size():
            stale = x.clone()
            pending.wait()
            pending.result = stale
        return pending

    shares = []
    for problem, cp_size in cases:
        hops = 0
        with mock.patch.object(MODULES[problem.comm], "launch_shift", shift):
            shares.append(solve(problem, cp_size))
    return shares


RIGHT_SHIFT = ring.launch_shift


@pytest.mark.parametrize(("comm", "label"), [("lv_xattn", "grad_q"), ("p2p", "grad_k")])
def test_a_ring_that_ends_in_the_wrong_buffer_is_seen(comm: str, label: str) -> None:
    lengths, anchors = (36,), ((30, 7, 18),)  # equal shards: stale rows fit
    problem = Problem(document_lengths=lengths, anchors=anchors, comm=comm, strategy="none")
    cases = [(problem, 3)]
    for p, cp_size, found, expected in found_and_expected(cases, 4, solve_with_stale_buffer, label):
        index = NAMES.index(label)
        worst = relative_error(found[index], expected[index])
        assert worst > 1e-2, describe(p, cp_size, label, worst)
        assert relative_error(found[0], expected[0]) < 1e-12, "forward has no such fault"


def solve_separately(problem: Problem, cp_size: int) -> list[torch.Tensor] | None:
    """Gradients of keys in tensors of their own, of which some want none."""
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return None
    plan, rank = problem.plan(cp_size), dist.get_rank()
    q, k, v, grad_out = problem.tensors(plan)
    mine, rows = own_slice(plan, rank), plan.num_rows(rank)
    q, k, v = q[mine].clone(), shard_keys(k, plan, rank), shard_keys(v, plan, rank)
    parts = [q, k[:rows].clone(), v[:rows].clone(), k[rows:].clone(), v[rows:].clone()]
    gradients = []
    for wanted in (range(5), (1,), (0, 4)):  # of q, context k, v, own k, v
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(parts)]
        out = split_context_parallel_attention(*leaves, plan, group, strategy=problem.comm)
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad_out[mine])
        gradients.append(dict(zip(wanted, found, strict=True)))
    everything, *fewer = gradients
    assert all(x.shape == parts[i].shape for i, x in everything.items())
    assert all(torch.equal(x, everything[i]) for some in fewer for i, x in some.items())
    joined = [torch.cat([everything[i], everything[i + 2]]) for i in (1, 2)]
    return [out.detach(), everything[0], *joined]


def solve_all_separately(cases: list[Case]) -> list[Any]:
    return [solve_separately(*case) for case in cases]


def test_backward_returns_one_gradient_for_each_of_its_inputs() -> None:
    problem = replace(MIXED, num_heads=6, num_key_heads=3)
    cases = [(replace(problem, comm=comm), 3) for comm in PEERS]
    for p, cp_size, found, expected in found_and_expected(cases, 4, solve_all_separately):
        for name, a, b in zip(NAMES, found, expected, strict=True):
            assert relative_error(a, b) < 1e-12, describe(p, cp_size, name, relative_error(a, b))


def solve_twice_and_autocast(cases: list[Case]) -> list[Any]:
    """The results, the same bits a second time and under autocast."""
    first, second = solve_all(cases), solve_all(cases)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        third = solve_all(cases)
    for shares in zip(first, second, third, strict=True):
        if shares[0] is not None:
            for a, b, c in zip(*shares, strict=True):
                assert torch.equal(a, b)
                assert torch.equal(a, c)
    return first


def test_results_are_deterministic_and_autocast_changes_nothing() -> None:
    problem = replace(MIXED, dtype=torch.float32, num_heads=6, num_key_heads=3)
    kernels = ("naive", "cpu")  # autocast would change the products of the first
    cases = [(replace(problem, comm=comm, kernel=k), 3) for comm in PEERS for k in kernels]
    assert len(list(found_and_expected(cases, 4, solve_twice_and_autocast))) == len(cases)


# Padding, anchors and poisoned memory, as `test_attention_cases` has them for split-KV.


@pytest.mark.parametrize("comm", PEERS)
def test_padding_content_changes_nothing(comm: str) -> None:
    problem = replace(splitkv_cases.TAIL, comm=comm)
    plan = problem.plan(4)
    first, *others = splitkv_cases._results(
        problem, 4, splitkv_cases._fill_padding, [0.0, 1e4, torch.nan]
    )
    padding = torch.from_numpy(~plan.layout.block_keep_mask).repeat_interleave(4)
    assert padding.any()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))
        for grad in other[2:]:
            assert grad[698:704].count_nonzero() == 0
            assert grad[704:][padding].count_nonzero() == 0


@pytest.mark.parametrize("comm", PEERS)
def test_overlapping_anchors_do_not_leak(comm: str) -> None:
    problem = Problem(document_lengths=(16,), anchors=((3, 5, 6),), comm=comm)
    variants = ["nothing", "context from 5 on", "block 0"]
    plain, *perturbed = splitkv_cases._results(
        problem, 4, splitkv_cases._perturb_for_block_1, variants
    )
    for other in perturbed:
        assert torch.equal(other[0][4:8], plain[0][4:8])
    for grad in plain[2:]:
        assert grad[5:16].count_nonzero() == 0, "context from the anchor on"
        assert grad[16:20].count_nonzero() == 0, "slots of block 0"
        assert bool((grad[:5] != 0).all())


def solve_on_poisoned_memory(cases: list[Case]) -> list[Any]:
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert bool(torch.empty(4).isnan().all()), "fresh memory is poisoned"
        return solve_all(cases)
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_nobody_wrote_is_read_by_nobody() -> None:
    problems = [MIXED, *EMPTY.values()]
    cases = [
        case
        for comm in PEERS
        for problem in problems
        for case in cases_of(replace(problem, comm=comm), 3)[:1]
    ]
    for p, cp_size, found, expected in found_and_expected(cases, 4, solve_on_poisoned_memory):
        for name, a, b in zip(NAMES, found, expected, strict=True):
            assert relative_error(a, b) < 1e-12, describe(p, cp_size, name, relative_error(a, b))
