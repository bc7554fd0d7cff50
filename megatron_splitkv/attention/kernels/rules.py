"""What each kernel can compute: pure rules on a machine and a request, with the reason.

`kernel_report` is what tools print; `selection` acts on the same rules.
"""

import functools
from dataclasses import dataclass

import torch

from megatron_splitkv import compat
from megatron_splitkv.config import KERNELS

_OLDEST_CUDNN = (9, 18)  # before it dk and dv of padded calls can be wrong on Hopper
_LINEAR_DETERMINISM_CUDNN = (9, 25)  # before it Hopper's deterministic backward is quadratic
_HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Machine:
    """A device and the libraries that serve it.

    Args:
        device_type: as torch names it.
        capability: compute capability of a CUDA device.
        cudnn: version of cuDNN, None without it.
        has_transformer_engine: whether it is installed.
        has_flash: whether torch was built with its FlashAttention.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    cudnn: tuple[int, int, int] | None = None
    has_transformer_engine: bool = False
    has_flash: bool = False


@dataclass(frozen=True)
class Request:
    """Tensors that a kernel is wanted for.

    Args:
        dtype: of q, k and v.
        num_heads: n_q.
        num_key_heads: n_kv.
        width: d.
        deterministic: whether `torch.use_deterministic_algorithms` is on.
    """

    dtype: torch.dtype
    num_heads: int
    num_key_heads: int
    width: int
    deterministic: bool = False


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """What is known of a device without running anything on it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return Machine(device.type)
    version = torch.backends.cudnn.version()
    return Machine(
        device_type="cuda",
        capability=torch.cuda.get_device_capability(device),
        cudnn=None if version is None else decode_cudnn_version(version),
        has_transformer_engine=compat.has_transformer_engine(),
        has_flash=torch.backends.cuda.is_flash_attention_available(),
    )


def decode_cudnn_version(number: int) -> tuple[int, int, int]:
    """cuDNN's own number as (major, minor, patch): 91801 is 9.18.1."""
    major, rest = divmod(number, 10000)
    return (major, *divmod(rest, 100))


def refusal(name: str, machine: Machine, request: Request) -> str | None:
    """Why a kernel cannot compute a request on a machine; None if it can.

    Args:
        name: a kernel, not ``auto``.
        machine: the device and its libraries.
        request: the tensors.

    Returns:
        What the kernel needs and what there is instead.
    """
    return _RULES[name](machine, request)


def kernel_report(machine: Machine, request: Request) -> dict[str, str | None]:
    """Every kernel by name, with why it cannot compute a request, or None."""
    return {name: refusal(name, machine, request) for name in KERNELS if name != "auto"}


def _refuse_nothing(machine: Machine, request: Request) -> str | None:
    return None


def _refuse_cpu(machine: Machine, request: Request) -> str | None:
    if machine.device_type != "cpu":
        return f"it computes on the CPU and the tensors are on {machine.device_type}"
    return None


def _refuse_te(machine: Machine, request: Request) -> str | None:
    if (reason := _refuse_gpu(machine, request, oldest=(9, 0))) is not None:
        return reason
    if machine.capability is not None and machine.capability[0] == 12:
        return "on compute capability 12 its statistics have a layout that cannot be merged"
    if not machine.has_transformer_engine:
        return "Transformer Engine is not installed (pip install 'megatron-splitkv[gpu]')"
    if machine.cudnn is None or machine.cudnn < _OLDEST_CUDNN:
        return f"it needs cuDNN >= {_dotted(_OLDEST_CUDNN)}, this is {_dotted(machine.cudnn)}"
    largest = 256 if machine.capability == (9, 0) else 128
    if (reason := _refuse_width(request, largest)) is not None:
        return reason
    quadratic = machine.capability == (9, 0) and machine.cudnn < _LINEAR_DETERMINISM_CUDNN
    if request.deterministic and quadratic:
        return (
            "its deterministic backward needs memory quadratic in the rows on compute capability "
            f"9.0 before cuDNN {_dotted(_LINEAR_DETERMINISM_CUDNN)}, this is "
            f"{_dotted(machine.cudnn)}"
        )
    return None


def _refuse_flash(machine: Machine, request: Request) -> str | None:
    if (reason := _refuse_gpu(machine, request, oldest=(8, 0))) is not None:
        return reason
    if not machine.has_flash:
        return "this build of torch is without FlashAttention"
    # The backward of wider heads wants more shared memory than these chips have.
    is_small = machine.capability is not None and (
        (8, 6) <= machine.capability <= (8, 9) or machine.capability >= (12, 0)
    )
    return _refuse_width(request, 192 if is_small else 256)


def _refuse_flex(machine: Machine, request: Request) -> str | None:
    dtypes = (*_HALF_PRECISION, torch.float32)
    if (reason := _refuse_gpu(machine, request, oldest=(8, 0), dtypes=dtypes)) is not None:
        return reason
    return f"it needs a head width >= 16, not {request.width}" if request.width < 16 else None


def _refuse_gpu(
    machine: Machine,
    request: Request,
    oldest: tuple[int, int],
    dtypes: tuple[torch.dtype, ...] = _HALF_PRECISION,
) -> str | None:
    if machine.capability is None:
        return f"it needs an NVIDIA GPU and the tensors are on {machine.device_type}"
    if machine.capability < oldest:
        return (
            f"it needs compute capability >= {_dotted(oldest)}, this is "
            f"{_dotted(machine.capability)}"
        )
    if request.dtype not in dtypes:
        names = [str(x).removeprefix("torch.") for x in (*dtypes, request.dtype)]
        return f"it computes {', '.join(names[:-1])}, not {names[-1]}"
    return None


def _refuse_width(request: Request, largest: int) -> str | None:
    if request.width % 8 or request.width > largest:
        return f"it needs a head width that 8 divides, at most {largest}, not {request.width}"
    return None


def _dotted(version: tuple[int, ...] | None) -> str:
    return "absent" if version is None else ".".join(map(str, version))


_RULES = {
    "naive": _refuse_nothing,
    "cpu": _refuse_cpu,
    "te": _refuse_te,
    "flash": _refuse_flash,
    "flex": _refuse_flex,
}
