"""The whole `te` kernel, forward and backward, over the emulated contract, against fp64 truth."""

from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels import Kernel, naive, te, thd
from megatron_splitkv.attention.kernels.te import TeKernel
from megatron_splitkv.attention.merge import delta_carrier, finite_or_zero, row_delta
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import LeafLimits, Rectangles, Staircase, build_staircase
from megatron_splitkv.testing import relative_error
from tests.attention.te_stub import VERSIONS, stubbed_transformer_engine
from tests.attention.thd_emulator import BACKEND, ContractBreach, ThdEmulator

B = 16
RECTANGLES_ONLY = LeafLimits(0, 0, 0)
NAMES = ("out", "lse", "dq", "dk", "dv")
# Relative errors: of a few dozen additions, and of one rounding of each factor.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass(frozen=True)
class Case:
    """What blocks see, and tensors to attend with; `fill` is what unused rows hold."""

    key_start: NDArray[np.int64]
    key_end: NDArray[np.int64]
    num_keys: int
    limits: LeafLimits = RECTANGLES_ONLY
    num_heads: int = 4
    num_key_heads: int = 2
    dtype: torch.dtype = torch.float64
    fill: float | None = None

    @property
    def staircase(self) -> Staircase:
        return build_staircase(self.key_start, self.key_end, B, self.limits)

    def tensors(self, staircase: Staircase) -> tuple[torch.Tensor, ...]:
        """q, k, v, the gradient of the output, the global lse and a carrier of the global delta."""
        generator = torch.Generator().manual_seed(3)

        def draw(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, 8, dtype=torch.float64, generator=generator)

        num_rows = staircase.num_rows
        q, grad_out, whole_out = (draw(num_rows, self.num_heads) for _ in range(3))
        k, v = (draw(self.num_keys, self.num_key_heads) for _ in range(2))
        if self.fill is not None:
            blind = torch.from_numpy(staircase.row_end <= staircase.row_start)
            seen = torch.zeros(self.num_keys, dtype=torch.bool)
            for start, end in zip(staircase.row_start, staircase.row_end, strict=True):
                seen[start:end] = True
            for x, unused in ((q, blind), (grad_out, blind), (k, ~seen), (v, ~seen)):
                x[unused] = self.fill
        q, k, v, grad_out = (x.to(self.dtype) for x in (q, k, v, grad_out))
        _, lse = naive.forward(q.double(), k.double(), v.double(), staircase, 0.3)
        lse = torch.logaddexp(lse, lse + torch.rand(lse.shape, generator=generator).double())
        delta = row_delta(grad_out.double(), whole_out).nan_to_num()
        carrier = delta_carrier(grad_out, delta.to(lse.dtype)).to(self.dtype)
        partial = torch.float64 if self.dtype == torch.float64 else torch.float32
        return q, k, v, grad_out, lse.to(partial), carrier


def documents(*ends: list[int], length: int, num_keys: int | None = None) -> Case:
    """Documents of `length` local keys each and their blocks' ends; -1 is a padding block."""
    start = np.concatenate([np.full(len(row), i * length) for i, row in enumerate(ends)])
    end = np.concatenate([np.asarray(row, dtype=np.int64) for row in ends])
    is_padding = end < 0
    start = np.where(is_padding, 0, start)
    end = np.where(is_padding, 0, start + end)
    return Case(start, end, length * len(ends) if num_keys is None else num_keys)


MANY_LEVELS = documents(list(range(1, 400, 9)), length=400)
MIXED = documents(
    [0, 0, 5, 5, 5, 59, -1],
    [-1, -1, 1],
    list(range(130, 300, 8)),
    [299, -1],
    length=300,
    num_keys=1300,
)
SHALLOW = documents([300, 300, 300], [7, 250], length=300)
CASES = {
    "many levels": MANY_LEVELS,
    "mixed": MIXED,
    "one level": SHALLOW,
    "with leaves": replace(MIXED, limits=LeafLimits(64, 40, 3000)),
    "tile leaves": replace(MANY_LEVELS, limits=thd.TILE_LEAF_LIMITS),
    "one key": documents([1], length=1),
    "padding only": documents([-1, -1], length=5),
    "no keys": documents([0, 0], length=0),
    "no blocks": documents([], length=7),
}


def run(kernel: Kernel, case: Case) -> list[torch.Tensor]:
    """Output, exp(lse) and the three gradients of a kernel for a case's own inputs."""
    staircase = case.staircase
    q, k, v, grad_out, lse, carrier = case.tensors(staircase)
    out, own_lse = kernel.forward(q, k, v, staircase, 0.3)
    grads = kernel.backward(grad_out, q, k, v, carrier, lse, staircase, 0.3)
    assert [x.dtype for x in (own_lse, grads[0])] == [out.dtype] * 2
    assert [x.dtype for x in grads[1:]] == [case.dtype] * 2
    return [out, own_lse, *grads]


def truth(case: Case) -> list[torch.Tensor]:
    staircase = case.staircase
    q, k, v, grad_out, lse, carrier = (x.double() for x in case.tensors(staircase))
    out, own_lse = naive.forward(q, k, v, staircase, 0.3)
    return [out, own_lse, *naive.backward(grad_out, q, k, v, carrier, lse, staircase, 0.3)]


def errors(kernel: Kernel, case: Case) -> dict[str, float]:
    found, expected = run(kernel, case), truth(case)
    if not torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf):
        return dict.fromkeys(NAMES, np.inf)
    for results in (found, expected):
        results[1] = finite_or_zero(results[1])
    return {n: relative_error(x, y) for n, x, y in zip(NAMES, found, expected, strict=True)}


def assert_right(kernel: Kernel, case: Case) -> None:
    for name, error in errors(kernel, case).items():
        assert error <= BOUNDS[case.dtype], f"{name} is off by {error:.2e}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_truth(case: Case, dtype: torch.dtype) -> None:
    assert_right(TeKernel(ThdEmulator().bound()), replace(case, dtype=dtype))


@pytest.mark.parametrize("num_key_heads", [6, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_head_groupings(num_key_heads: int, dtype: torch.dtype) -> None:
    case = replace(MIXED, num_heads=6, num_key_heads=num_key_heads, dtype=dtype)
    assert_right(TeKernel(ThdEmulator().bound()), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", VERSIONS)
def test_through_the_python_of_every_version(version: str, dtype: torch.dtype) -> None:
    emulator = ThdEmulator()
    with stubbed_transformer_engine(version, emulator) as calls:
        assert_right(TeKernel(compat.fused_attention()), replace(MIXED, dtype=dtype))
    assert len(calls["fused_attn_fwd"]) == len(calls["fused_attn_bwd"]) > 1


@pytest.mark.parametrize("case", [MIXED, CASES["with leaves"]], ids=["rectangles", "leaves"])
def test_unused_rows_may_hold_nan(case: Case) -> None:
    case = replace(case, fill=torch.nan)
    assert_right(TeKernel(ThdEmulator().bound(), zero_unused_rows=True), case)
    assert_right(TeKernel(ThdEmulator(reads_behind=False).bound()), case)
    # The emulated engine does multiply them by 0, so the copies are what helps.
    assert errors(TeKernel(ThdEmulator().bound()), case)["out"] == np.inf


def test_strided_inputs() -> None:
    staircase = MIXED.staircase
    tensors = MIXED.tensors(staircase)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    results = []
    for q, k, v, grad_out, lse, carrier in (tensors, strided):
        kernel = TeKernel(ThdEmulator().bound())
        out = kernel.forward(q, k, v, staircase, 0.3)
        results.append([*out, *kernel.backward(grad_out, q, k, v, carrier, lse, staircase, 0.3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_are_read_in_place() -> None:
    emulator = ThdEmulator()
    staircase = MIXED.staircase
    q, k, v, *_ = MIXED.tensors(staircase)
    TeKernel(emulator.bound()).forward(q, k, v, staircase, 0.3)
    for call in emulator.calls:
        assert [call[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]


def test_one_call_a_level_all_of_one_form() -> None:
    emulator = ThdEmulator()
    run(TeKernel(emulator.bound()), MIXED)
    assert len(emulator.calls) == 2 * len(MIXED.staircase.levels)
    forms = {
        (call["cu_seqlens_q"].numel(), call["max_seqlen_q"], call["max_seqlen_kv"])
        for call in emulator.calls
    }
    assert forms == {(32 + 1, 512, 512)}  # powers of two above 22 blocks of 16, and 299 keys


def test_empty_rectangles_are_left_out() -> None:
    start = np.array([0, 1, 2])
    level = Rectangles(start, np.array([1, 2, 2]), np.array([0, 4, 4]), np.array([4, 4, 6]))
    nothing = Rectangles(*(np.empty(0, dtype=np.int64) for _ in range(4)))
    rows = np.repeat([0, 0], B), np.repeat([4, 0], B)
    staircase = Staircase([level, level._select(start[1:])], nothing, *rows, B, 0, 0)
    (call,) = thd.thd_calls(staircase, 6, torch.device("cpu")).calls
    assert call.cu_seqlens_q.tolist() == [0] + [B] * 32
    assert call.cu_seqlens_kv.tolist() == [0] + [4] * 32
    assert call.starts_q.tolist() == [0] + [2 * B] * 32
    assert call.starts_kv.tolist() == [0] + [6] * 32


def test_metadata_is_laid_out_once() -> None:
    staircase = SHALLOW.staircase
    first = thd.thd_calls(staircase, 600, torch.device("cpu"))
    assert thd.thd_calls(staircase, 600, torch.device("cpu")) is first
    assert thd.thd_calls(staircase, 601, torch.device("cpu")) is not first


@pytest.mark.parametrize(
    ("num_sequences", "width"), [(0, 32), (1, 32), (32, 32), (33, 64), (64, 64), (65, 128)]
)
def test_width_of_calls(num_sequences: int, width: int) -> None:
    assert thd.call_width(num_sequences) == width


def test_row_counts_fit_int32() -> None:
    thd.check_row_count(2**31 - 1, 0)
    thd.check_row_count(0, 2**31 - 1)
    for rows in ((2**31, 1), (1, 2**31)):
        with pytest.raises(ConfigError, match=r"2147483648 rows.*at most 2147483647"):
            thd.check_row_count(*rows)


def test_starts_are_not_computed_in_int32() -> None:
    # Blocks times block size passes int32 long before anything is cast to it.
    level = Rectangles(*(np.array([x]) for x in (2**28, 2**28 + 1, 0, 1)))
    start, length = thd.row_ranges(level, 16)
    assert start[0].tolist() == [2**32]
    assert length[0].tolist() == [16]


def test_determinism_is_passed_on() -> None:
    emulator = ThdEmulator()
    kernel = TeKernel(emulator.bound())
    for wanted in (False, True):
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda w=wanted: w):
            run(kernel, SHALLOW)
        assert emulator.calls[-1]["deterministic"] is wanted


def test_the_default_generator_is_left_alone() -> None:
    emulator = ThdEmulator()
    run(TeKernel(emulator.bound()), SHALLOW)
    generators = {id(call["rng_gen"]) for call in emulator.calls if "rng_gen" in call}
    assert len(generators) == 1
    assert id(torch.default_generator) not in generators


# Wrong variants that a tolerance must not hide.


class LocalLse(TeKernel):
    """The backward normalised by what this rank alone sees."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_out, q, k, v, out_carrier, _, staircase, scale = args
        _, local = self.forward(q, k, v, staircase, scale)
        return super().backward(grad_out, q, k, v, out_carrier, local, staircase, scale)


def test_statistics_between_ranges_must_be_overwritten() -> None:
    with mock.patch.object(te.torch, "where", lambda condition, x, other: x):
        assert errors(TeKernel(ThdEmulator().bound()), MIXED)["out"] == np.inf


def test_backward_needs_the_global_lse() -> None:
    found = errors(LocalLse(ThdEmulator().bound()), MIXED)
    assert min(found[name] for name in ("dq", "dk", "dv")) > 0.1


@pytest.mark.parametrize("accumulator", [torch.float32, torch.bfloat16])
def test_gradients_of_levels_must_add_up_in_fp32(accumulator: torch.dtype) -> None:
    case = replace(MANY_LEVELS, dtype=torch.bfloat16)
    emulator = ThdEmulator()
    parts: list[list[torch.Tensor]] = []
    right = emulator.fused_attn_bwd
    emulator.fused_attn_bwd = wraps(right)(  # type: ignore[method-assign]
        lambda **call: parts.append(right(**call)) or parts[-1]
    )
    kernel = TeKernel(emulator.bound())
    staircase = case.staircase
    q, k, v, grad_out, lse, carrier = case.tensors(staircase)
    with mock.patch.object(te, "accumulator_dtype", return_value=accumulator):
        grads = kernel.backward(grad_out, q, k, v, carrier, lse, staircase, 0.3)
    for i, grad in enumerate(grads):
        total = sum(part[i].float() for part in parts).to(grad.dtype)
        assert torch.equal(grad, total) == (accumulator == torch.float32)


def test_ranges_must_begin_at_their_starts() -> None:
    found = errors(TeKernel(ThdEmulator(ignores_starts=True).bound()), replace(MIXED, fill=99.0))
    assert max(found.values()) > 0.1


@pytest.mark.parametrize("fault", ["cumulative for starts", "sides swapped", "end for length"])
def test_wrong_metadata_is_seen(fault: str) -> None:
    right = thd._call

    def wrong(*args: Any) -> thd.ThdCall:
        call = right(*args)
        if fault == "cumulative for starts":
            return replace(call, starts_q=call.cu_seqlens_q, starts_kv=call.cu_seqlens_kv)
        if fault == "sides swapped":
            return replace(call, starts_q=call.starts_kv, starts_kv=call.starts_q)
        return replace(call, cu_seqlens_q=call.starts_q - call.starts_q[0])

    with mock.patch.object(thd, "_call", wrong):
        try:
            found = errors(TeKernel(ThdEmulator().bound()), MIXED)
        except ContractBreach:
            return
    assert max(found.values()) > 0.1


@pytest.mark.parametrize(
    "breach",
    [
        {"cu_seqlens_kv": [0, 5, 5]},
        {"cu_seqlens_q": [0, 16, 16]},
        {"cu_seqlens_q": [0, 16, 8]},
        {"cu_seqlens_q_padded": [32, 0, 64]},
        {"cu_seqlens_q_padded": [0, 8, 64]},
        {"cu_seqlens_kv_padded": [0, 3, 20]},
        {"cu_seqlens_q_padded": [0, 16, 65]},
        {"max_seqlen_q": 15},
        {"max_seqlen_kv": 4},
        {"qkv_layout": "sbhd_sbhd_sbhd"},
        {"attn_mask_type": "no_mask"},
        {"aux_ctx_tensors": [torch.zeros(64, 2), torch.zeros(2, dtype=torch.int64)]},
        {
            "aux_ctx_tensors": [
                torch.zeros(64, 2, 1, dtype=torch.bfloat16),
                torch.zeros(2, dtype=torch.int64),
            ]
        },
        {"do_format": "sbhd"},
    ],
    ids=lambda breach: "-".join(breach),
)
def test_the_emulator_raises_where_a_call_leaves_the_contract(breach: dict[str, Any]) -> None:
    rows, keys = torch.zeros(64, 2, 8), torch.zeros(20, 2, 8)
    call: dict[str, Any] = {
        "cu_seqlens_q": [0, 16, 32],
        "cu_seqlens_kv": [0, 5, 10],
        "cu_seqlens_q_padded": [0, 16, 64],
        "cu_seqlens_kv_padded": [0, 6, 20],
        **{"max_seqlen_q": 16, "max_seqlen_kv": 8, "fake_dtype": torch.float32},
        **{"q": rows, "k": keys, "v": keys, "o": rows, "d_o": rows, "attn_scale": 0.3},
        **{"qkv_layout": "thd_thd_thd", "o_format": "thd", "do_format": "thd"},
        **{"dqkv_layout": "thd_thd_thd", "attn_mask_type": "padding"},
        "fused_attention_backend": BACKEND,
        "aux_ctx_tensors": [torch.zeros(64, 2, 1), torch.zeros(2, dtype=torch.int64)],
    }

    def backward(changes: dict[str, Any]) -> None:
        keywords = {
            name: torch.tensor(x, dtype=torch.int32) if name.startswith("cu_") else x
            for name, x in (call | changes).items()
        }
        ThdEmulator().fused_attn_bwd(**keywords)

    backward({})
    with pytest.raises(ContractBreach):
        backward(breach)
