"""Which kernel is taken: rules, the self-test on the emulator, fallbacks with their reasons."""

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels import cpu, naive, select_kernel, selection
from megatron_splitkv.attention.kernels.rules import (
    Machine,
    Request,
    decode_cudnn_version,
    kernel_report,
    machine_of,
    refusal,
)
from megatron_splitkv.attention.kernels.self_test import kernel_failure
from megatron_splitkv.attention.kernels.te import TeKernel
from megatron_splitkv.compat import attention_functions
from megatron_splitkv.config import KERNELS, ConfigError
from tests.attention.thd_emulator import ThdEmulator

HOPPER = Machine("cuda", (9, 0), (9, 18, 1), has_transformer_engine=True, has_flash=True)
BLACKWELL = replace(HOPPER, capability=(10, 0))
AMPERE = replace(HOPPER, capability=(8, 0))
REQUEST = Request(torch.bfloat16, 8, 2, 64)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "request_", "reason"),
    [
        (HOPPER, REQUEST, None),
        (BLACKWELL, REQUEST, None),
        (HOPPER, replace(REQUEST, dtype=torch.float16, width=128), None),
        (HOPPER, replace(REQUEST, width=256), None),
        (replace(HOPPER, cudnn=(9, 25, 0)), replace(REQUEST, deterministic=True), None),
        (BLACKWELL, replace(REQUEST, deterministic=True), None),
        (BLACKWELL, replace(REQUEST, width=136), "at most 128, not 136"),
        (HOPPER, replace(REQUEST, width=264), "at most 256, not 264"),
        (HOPPER, replace(REQUEST, width=60), "that 8 divides.*not 60"),
        (HOPPER, replace(REQUEST, dtype=torch.float32), "bfloat16, float16, not float32"),
        (AMPERE, REQUEST, r"compute capability >= 9\.0, this is 8\.0"),
        (replace(HOPPER, capability=(12, 0)), REQUEST, "capability 12"),
        (replace(HOPPER, cudnn=(9, 17, 9)), REQUEST, r"cuDNN >= 9\.18, this is 9\.17\.9"),
        (replace(HOPPER, cudnn=None), REQUEST, r"cuDNN >= 9\.18, this is absent"),
        (replace(HOPPER, has_transformer_engine=False), REQUEST, "not installed"),
        (HOPPER, replace(REQUEST, deterministic=True), r"quadratic.*cuDNN 9\.25, this is 9\.18\.1"),
        (Machine("cpu"), REQUEST, "needs an NVIDIA GPU and the tensors are on cpu"),
    ],
)
def test_rules_of_te(machine: Machine, request_: Request, reason: str | None) -> None:
    found = refusal("te", machine, request_)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_rules_of_the_others() -> None:
    assert refusal("flash", AMPERE, replace(REQUEST, width=256)) is None
    small = replace(AMPERE, capability=(8, 9))
    assert "at most 192" in str(refusal("flash", small, replace(REQUEST, width=256)))
    assert "without FlashAttention" in str(
        refusal("flash", replace(AMPERE, has_flash=False), REQUEST)
    )
    assert "float32" in str(refusal("flash", AMPERE, replace(REQUEST, dtype=torch.float32)))
    assert refusal("flex", AMPERE, replace(REQUEST, dtype=torch.float32)) is None
    assert "not float64" in str(refusal("flex", AMPERE, replace(REQUEST, dtype=torch.float64)))
    assert ">= 16, not 8" in str(refusal("flex", AMPERE, replace(REQUEST, width=8)))
    assert "on cuda" in str(refusal("cpu", HOPPER, REQUEST))
    assert refusal("cpu", Machine("cpu"), REQUEST) is None
    assert refusal("naive", HOPPER, replace(REQUEST, dtype=torch.float64, width=7)) is None


def test_report_names_every_kernel() -> None:
    report = kernel_report(machine_of(CPU), REQUEST)
    assert set(report) == set(KERNELS) - {"auto"}
    assert [name for name, reason in report.items() if reason is None] == ["naive", "cpu"]


def test_cudnn_version() -> None:
    assert decode_cudnn_version(91801) == (9, 18, 1)
    assert decode_cudnn_version(92500) == (9, 25, 0)


# The self-test.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("width", [8, 64, 128])
def test_a_right_kernel_passes(dtype: torch.dtype, heads: tuple[int, int], width: int) -> None:
    request = Request(dtype, *heads, width)
    kernel = TeKernel(ThdEmulator(reads_behind=False).bound())
    for unused_rows in (1e4, torch.nan):
        assert kernel_failure(kernel, request, CPU, unused_rows=unused_rows) is None


def faulty(fault: str) -> compat.FusedAttention:
    """An engine with one fault."""
    right = ThdEmulator(reads_behind=False, ignores_starts=fault == "ignores starts").bound()

    def forward(**call: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("no engine")
        out, (statistics, rng_state) = right.forward(**call)
        if fault == "lse in base 2":
            statistics = statistics / 0.6931
        return out, [statistics, rng_state]

    def backward(**call: Any) -> Any:
        statistics, rng_state = call["aux_ctx_tensors"]
        if fault == "own lse":
            given = {name: call[name] for name in attention_functions._PER_CALL}
            _, aux = right.forward(**given, rng_gen=None)
            call["aux_ctx_tensors"] = [aux[0].nan_to_num(), rng_state]
        grads = right.backward(**call)
        if fault == "rows far below overflow":
            grads[0][statistics[..., 0] < -88.7] = torch.nan
        if fault == "unscaled dk":
            grads[1] = grads[1] / call["attn_scale"]
        return grads

    return compat.FusedAttention(forward, backward)


FAULTS = {
    "ignores starts": "output",
    "lse in base 2": "output|log-sum-exp",
    "fails": "no engine",
    "rows far below overflow": "dq",
    "own lse": "dq",
    "unscaled dk": "dk",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_finds_faults(fault: str) -> None:
    found = kernel_failure(TeKernel(faulty(fault)), REQUEST, CPU, unused_rows=1e4)
    assert found is not None
    assert re.search(FAULTS[fault], found)


def test_the_self_test_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    kernel_failure(TeKernel(ThdEmulator().bound()), REQUEST, CPU, unused_rows=1e4)
    assert torch.equal(torch.get_rng_state(), before)


# Selection. A GPU is played by the CPU: its machine is told to be another.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``auto`` as on Hopper, over the emulator."""
    monkeypatch.setattr(selection, "machine_of", lambda device: HOPPER)
    monkeypatch.setattr(selection, "_BY_PREFERENCE", {"cpu": selection._BY_PREFERENCE["cuda"]})
    monkeypatch.setattr(compat, "fused_attention", lambda: ThdEmulator().bound())
    selection._tested_te_kernel.cache_clear()
    selection._warn_once.cache_clear()
    yield monkeypatch
    selection._tested_te_kernel.cache_clear()
    selection._warn_once.cache_clear()


def _q(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> torch.Tensor:
    return torch.zeros(0, 4, width, dtype=dtype)


def test_auto_on_the_cpu_and_names() -> None:
    assert select_kernel("auto", _q()) is cpu
    assert select_kernel("cpu", _q()) is cpu
    assert select_kernel("naive", _q()) is naive
    with pytest.raises(ConfigError, match=r"kernel 'sdpa' is not known.*auto, naive, cpu, te"):
        select_kernel("sdpa", _q())


@pytest.mark.parametrize("name", ["te", "flash", "flex"])
def test_a_named_kernel_that_cannot_is_one_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"kernel '{name}': it needs an NVIDIA GPU.*'auto'"):
        select_kernel(name, _q())


def test_cpu_kernel_is_refused_for_cuda_tensors(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'cpu': it computes on the CPU.*are on cuda"):
        select_kernel("cpu", _q())


def test_auto_takes_te_after_one_self_test(gpu: pytest.MonkeyPatch) -> None:
    emulators: list[ThdEmulator] = []

    def fused_attention() -> compat.FusedAttention:
        emulators.append(ThdEmulator(reads_behind=False))
        return emulators[-1].bound()

    gpu.setattr(compat, "fused_attention", fused_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = select_kernel("auto", _q(), 2), select_kernel("te", _q(), 2)
    assert isinstance(first, TeKernel)
    assert not first.zero_unused_rows
    assert second is first
    assert len(emulators) == 1
    assert emulators[0].calls
    select_kernel("auto", _q(), 4)  # other key heads are another engine
    select_kernel("auto", _q(torch.float16), 2)
    assert len(emulators) == 3


def test_an_engine_that_multiplies_unused_rows_by_zero_gets_copies(gpu: pytest.MonkeyPatch) -> None:
    kernel = select_kernel("auto", _q())
    assert isinstance(kernel, TeKernel)
    assert kernel.zero_unused_rows


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_self_test_falls_back_with_one_warning(
    gpu: pytest.MonkeyPatch, fault: str
) -> None:
    gpu.setattr(compat, "fused_attention", lambda: faulty(fault))
    with pytest.warns(RuntimeWarning, match="'flash' instead of 'te': it fails its") as caught:
        kernels = [select_kernel("auto", _q()) for _ in range(3)]
    assert len(caught) == 1
    assert {kernel.__name__.rsplit(".", 1)[-1] for kernel in kernels} == {"flash"}
    with pytest.raises(ConfigError, match="kernel 'te': it fails its self-test on this device"):
        select_kernel("te", _q())


def test_without_transformer_engine_auto_is_flash(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(selection, "machine_of", lambda d: replace(HOPPER, has_transformer_engine=False))
    with pytest.warns(RuntimeWarning, match=r"'flash' instead of 'te'.*is not installed"):
        select_kernel("auto", _q())


def test_a_transformer_engine_that_cannot_be_used_is_named(gpu: pytest.MonkeyPatch) -> None:
    def fused_attention() -> compat.FusedAttention:
        raise ConfigError("Transformer Engine cannot be imported: OSError('libcudnn')")

    gpu.setattr(compat, "fused_attention", fused_attention)
    with pytest.warns(RuntimeWarning, match=r"'flash' instead of 'te'.*libcudnn"):
        select_kernel("auto", _q())


def test_what_neither_can_is_naive(gpu: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match="'naive' instead of 'te': .*; 'flash': .*float32"):
        assert select_kernel("auto", _q(torch.float32)) is naive


def test_importing_attention_imports_no_kernel_of_others() -> None:
    probe = (
        "import sys, megatron_splitkv.attention\n"
        "assert 'transformer_engine' not in sys.modules\n"
        "assert 'megatron_splitkv.attention.kernels.te' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=300)
