"""The CPU mode: what it pretends, what it keeps apart, and that it can be undone."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from megatron_splitkv.cpu import cpu_mode, cpu_mode_enabled, disable_cpu_mode, enable_cpu_mode

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the mode is for CPUs")


@pytest.fixture
def mode() -> Iterator[None]:
    with cpu_mode():
        yield


class _TypeInBackward(torch.autograd.Function):
    """Records what `Tensor.type` says while backward runs, as Megatron's hooks would hear it."""

    heard: str = ""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        _TypeInBackward.heard = torch.zeros(1, device="cuda").type()
        return grad * 2


def test_importing_changes_nothing() -> None:
    code = (
        "import torch; before = dict(vars(torch.cuda)); import megatron_splitkv.cpu, sys;"
        "assert all(vars(torch.cuda)[k] is v for k, v in before.items());"
        "assert 'megatron.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_undo_restores_every_attribute() -> None:
    with cpu_mode():
        pass  # whatever Megatron imports lazily is imported now
    before = {name: dict(vars(o)) for name, o in _patched_owners().items()}
    assert enable_cpu_mode()
    assert torch.cuda.device_count() == 1
    disable_cpu_mode()
    for name, owner in _patched_owners().items():
        assert dict(vars(owner)) == before[name], name
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def _patched_owners() -> dict[str, object]:
    from megatron.core.tensor_parallel import random as megatron_random

    return {
        "torch.cuda": torch.cuda,
        "torch.cuda.random": torch.cuda.random,
        "torch.autograd": torch.autograd,
        "torch.nn.Module": torch.nn.Module,
        "megatron random": megatron_random,
    }


def test_is_a_no_op_where_cuda_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(vars(torch.cuda))
    assert not enable_cpu_mode()
    assert not cpu_mode_enabled()
    assert dict(vars(torch.cuda)) == before


def test_a_mode_in_force_outlives_an_inner_block() -> None:
    with cpu_mode():
        with cpu_mode():
            pass
        assert cpu_mode_enabled()
    assert not cpu_mode_enabled()


@pytest.mark.usefixtures("mode")
def test_cuda_requests_are_answered_with_the_cpu() -> None:
    x = torch.ones(2, device="cuda")
    assert x.device.type == "cpu"
    assert x.cuda() is x
    assert x.pin_memory() is x
    assert x.to("cuda:0").device.type == "cpu"
    assert x.to(device=torch.device("cuda")).device.type == "cpu"
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == torch.float64  # a conversion is no question
    module = torch.nn.Linear(2, 2)
    assert module.cuda() is module


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("run", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_mode_stays_on_inside_backward(run: str) -> None:
    x = torch.ones(2, requires_grad=True)
    loss = _TypeInBackward.apply(x).sum()
    _TypeInBackward.heard = ""
    if run == "Tensor.backward":
        loss.backward()
    elif run == "autograd.backward":
        torch.autograd.backward(loss)
    else:
        torch.autograd.grad(loss, x)
    assert _TypeInBackward.heard == "torch.cuda.FloatTensor"


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3, device="cuda"),
        lambda: torch.randn(3, device="cuda"),
        lambda: torch.randint(9, (3,), device="cuda"),
        lambda: F.dropout(torch.ones(50), 0.5),
    ],
)
def test_draws_of_the_device_leave_the_cpu_generator_alone(draw: object) -> None:
    """A generator for both is what made CPU-initialised weights depend on the cp size."""
    torch.manual_seed(7)
    torch.cuda.manual_seed(8)
    state = torch.get_rng_state()
    first = draw()  # type: ignore[operator]
    assert torch.equal(torch.get_rng_state(), state)
    second = draw()  # type: ignore[operator]
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(8)
    assert torch.equal(draw(), first)  # type: ignore[operator]


@pytest.mark.usefixtures("mode")
def test_draws_of_the_cpu_leave_the_device_generator_alone() -> None:
    torch.cuda.manual_seed(8)
    state = torch.cuda.get_rng_state()
    torch.rand(3)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.usefixtures("mode")
def test_manual_seed_seeds_both_generators_as_on_a_gpu() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2), torch.rand(2, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), expected[0])
    assert torch.equal(torch.rand(2, device="cuda"), expected[1])


@pytest.mark.usefixtures("mode")
def test_megatrons_rng_tracker_forks_the_device_generator() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 11)
    torch.cuda.manual_seed(1)
    outside, cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    assert torch.equal(torch.get_rng_state(), cpu)
    with tracker.fork("a"):
        second = torch.rand(4, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(11)
    assert torch.equal(torch.rand(4, device="cuda"), first)


@pytest.mark.usefixtures("mode")
def test_recompute_repeats_the_same_dropout() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.manual_seed(3)
    megatron_random.initialize_rng_tracker(force_reset=True)
    x = torch.ones(64, requires_grad=True)
    out = megatron_random.checkpoint(lambda t: F.dropout(t, 0.5), False, x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
