"""Explicit CPU mode: lets Megatron-core run on a CPU with gloo, for tests and the quick start.

Megatron-core names CUDA in many places where any device would do: ``device="cuda"``, streams,
``torch.cuda.FloatTensor`` in a type check. `enable_cpu_mode` answers those places with the CPU, so
that the very same model, optimizer, schedules and checkpoints run on a machine without a GPU.

What it changes, process-wide, until `disable_cpu_mode`:

* a torch-function mode turns ``device="cuda"`` into the CPU, makes ``Tensor.cuda`` and
  ``Tensor.pin_memory`` return their tensor, and lets ``Tensor.type()`` answer
  ``torch.cuda.FloatTensor`` where the truth is ``torch.FloatTensor``. **This is a lie about every
  tensor of the process**: code that asks `Tensor.type()` is misled, code that asks
  `Tensor.device` or `torch.cuda.is_available` hears the truth.
* ``torch.cuda``'s streams, memory counters, device count and properties become stand-ins.
* the pretended CUDA generator is a generator of its own. A draw for ``device="cuda"``, a dropout
  and Megatron's RNG tracker use it; all other draws use the CPU generator. Mixing the two would
  make CPU-initialised weights depend on how many numbers the "device" drew before, which differs
  between context-parallel sizes.

Where CUDA is available nothing is changed. Importing this module changes nothing.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

_RANDOM_FACTORIES = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
)  # they take `device` and `generator`
_DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_, torch.native_dropout})
_IDENTITIES = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})


def _names_cuda(device: Any) -> bool:
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


class _CudaGenerator:
    """The random state of the device that does not exist, kept in a CPU generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def get_state(self, device: Any = None) -> torch.Tensor:
        return self.generator.get_state()

    def set_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(int(seed))

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Let torch's default CPU generator draw from this state, then give it back."""
        cpu_state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(cpu_state)


class _CudaAsCpu(TorchFunctionMode):
    """Answers requests for a CUDA device with the CPU."""

    def __init__(self, cuda_generator: _CudaGenerator) -> None:
        super().__init__()
        self._cuda_generator = cuda_generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _IDENTITIES:
            return args[0]
        if func in _DROPOUTS:  # Megatron drops out on the device, whatever tensor it hands over
            with self._cuda_generator.as_default():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and len(args) > 1:
            target = args[1]
            if isinstance(target, str | torch.device) and _names_cuda(target):
                args = (args[0], _CPU, *args[2:])
        if not kwargs:
            if func is torch.Tensor.type and len(args) == 1:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            return func(*args)
        kwargs = dict(kwargs)
        kwargs.pop("pin_memory", None)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
            if func in _RANDOM_FACTORIES and kwargs.get("generator") is None:
                kwargs["generator"] = self._cuda_generator.generator
        return func(*args, **kwargs)


class _NoStream:
    """A CUDA stream's face; work on a CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Patches:
    """Attributes replaced so far, so that they can be put back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)


_mode: _CudaAsCpu | None = None
_covers_training = False
_patches = _Patches()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _patch_torch(cuda_generator: _CudaGenerator) -> None:
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=0, multi_processor_count=1
    )
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,  # Megatron hands it on as `device=`
        "device_count": lambda: 1,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": _NoStream,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_, **__: (9, 0),
        "memory_stats": lambda *_, **__: {},
        "get_rng_state": cuda_generator.get_state,
        "set_rng_state": cuda_generator.set_state,
        "manual_seed": cuda_generator.manual_seed,
        "manual_seed_all": cuda_generator.manual_seed,
    }
    for counter in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
    ):
        replacements[counter] = _zero
    for name, value in replacements.items():
        _patches.replace(torch.cuda, name, value)
    _patches.replace(torch.cuda.random, "get_rng_state", cuda_generator.get_state)
    _patches.replace(torch.cuda.random, "set_rng_state", cuda_generator.set_state)
    _patches.replace(torch.nn.Module, "cuda", lambda self, device=None: self)


def _patch_backward(mode: _CudaAsCpu) -> None:
    """Keep the mode on inside backward, where recomputation and gradient hooks run.

    torch switches a torch-function mode off while it handles a call, and a backward pass is one
    such call.
    """
    run_backward = torch.autograd._engine_run_backward

    @functools.wraps(run_backward)
    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    _patches.replace(torch.autograd, "_engine_run_backward", run_backward_in_mode)


def _patch_megatron_core(cuda_generator: _CudaGenerator) -> None:
    megatron_random = importlib.import_module("megatron.core.tensor_parallel.random")
    # The original defers the write until CUDA is initialised, which never happens here.
    _patches.replace(megatron_random, "_set_cuda_rng_state", cuda_generator.set_state)


def _patch_megatron_training() -> None:
    training = importlib.import_module("megatron.training.training")
    _patches.replace(
        training,
        "initialize_megatron",
        functools.partial(training.initialize_megatron, allow_no_cuda=True),
    )
    # It warms up fused CUDA kernels: on a CPU it would compile them all for nothing.
    _patches.replace(training, "set_jit_fusion_options", _nothing)
    _patches.replace(training, "report_memory", _nothing)  # of a device that has none


def cpu_mode_enabled() -> bool:
    """Whether `enable_cpu_mode` is in force in this process."""
    return _mode is not None


def enable_cpu_mode() -> bool:
    """Let Megatron-core build and train modules on the CPU of this process.

    Call it before any Megatron module is built. Calling it again does nothing, except that parts of
    Megatron imported in the meantime are covered as well. `megatron.training` is covered once it
    has been imported; this function does not import it.

    Returns:
        Whether the mode is in force: False where CUDA is available, and nothing was changed.
    """
    global _mode, _covers_training
    if torch.cuda.is_available():
        return False
    if _mode is None:
        # First, because it loads torch.compile, whose tables want torch.cuda as it was.
        importlib.import_module("megatron.core")
        cuda_generator = _CudaGenerator()
        mode = _CudaAsCpu(cuda_generator)
        _patch_torch(cuda_generator)
        _patch_backward(mode)
        _patch_megatron_core(cuda_generator)
        mode.__enter__()
        _mode = mode
    if not _covers_training and "megatron.training.training" in sys.modules:
        _patch_megatron_training()
        _covers_training = True
    return True


def disable_cpu_mode() -> None:
    """Undo `enable_cpu_mode`: put every replaced attribute back, if any was replaced."""
    global _mode, _covers_training
    if _mode is None:
        return
    _mode.__exit__(None, None, None)
    _patches.undo()
    _mode, _covers_training = None, False


@contextlib.contextmanager
def cpu_mode() -> Iterator[bool]:
    """`enable_cpu_mode` for a ``with`` block; a mode already in force stays in force after it.

    Returns:
        A context manager whose value is that of `enable_cpu_mode`.
    """
    was_enabled = cpu_mode_enabled()
    try:
        yield enable_cpu_mode()
    finally:
        if not was_enabled:
            disable_cpu_mode()
