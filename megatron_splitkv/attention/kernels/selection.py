"""From a kernel's name and the tensors to the kernel; ``auto`` takes the best that works here."""

import functools
import importlib
import warnings

import torch

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels.interface import Kernel
from megatron_splitkv.attention.kernels.rules import Request, machine_of, refusal
from megatron_splitkv.config import KERNELS, ConfigError, require_choice

_BY_PREFERENCE = {"cpu": ("cpu",), "cuda": ("te", "flash", "naive")}
_LARGE = 1e4  # well within fp16, and far from anything that a small problem holds


def select_kernel(name: str, q: torch.Tensor, num_key_heads: int | None = None) -> Kernel:
    """Return the kernel of that name, or the best for these tensors if it is ``auto``.

    ``auto`` is `cpu` on the CPU. On a GPU it is `te` if its rules hold and its self-test on the
    device passes, else `flash` with one warning that says why, else `naive` with one more.

    Args:
        name: one of `megatron_splitkv.config.KERNELS`.
        q: queries ``[rows, n_q, d]`` as the kernel will get them; only what they are like counts.
        num_key_heads: n_kv; as many as query heads if None.

    Raises:
        ConfigError: unknown name, or a named kernel that cannot compute these tensors here.
    """
    require_choice("attention kernel", name, KERNELS)
    request = Request(
        dtype=q.dtype,
        num_heads=q.shape[1],
        num_key_heads=num_key_heads or q.shape[1],
        width=q.shape[2],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if name != "auto":
        found = find_kernel(name, q.device, request)
        if isinstance(found, str):
            raise ConfigError(
                f"attention kernel {name!r}: {found}; choose another kernel, or 'auto'"
            )
        return found
    refused: list[str] = []
    for candidate in _BY_PREFERENCE.get(q.device.type, ("naive",)):
        found = find_kernel(candidate, q.device, request)
        if not isinstance(found, str):
            if refused:
                _warn_once(f"attention kernel {candidate!r} instead of {'; '.join(refused)}")
            return found
        refused.append(f"{candidate!r}: {found}")
    raise AssertionError("the last choice has no rules")


def find_kernel(name: str, device: torch.device, request: Request) -> Kernel | str:
    """The kernel of that name, ready for tensors like these on a device, or why there is none.

    Args:
        name: a kernel, not ``auto``.
        device: where the tensors are.
        request: what they are like.
    """
    reason = refusal(name, machine_of(device), request)
    if reason is not None:
        return reason
    if name == "te":
        return _tested_te_kernel(device, request)
    kernel: Kernel = importlib.import_module(f"megatron_splitkv.attention.kernels.{name}")
    return kernel


@functools.cache
def _tested_te_kernel(device: torch.device, request: Request) -> Kernel | str:
    """The `te` kernel in the form that passes its self-test on a device, or what is wrong."""
    # Its modules are needed by nobody else, and one of them runs `naive` on the device.
    from megatron_splitkv.attention.kernels.self_test import kernel_failure
    from megatron_splitkv.attention.kernels.te import TeKernel

    try:
        fused = compat.fused_attention()
    except ConfigError as error:
        return str(error)
    kernel = TeKernel(fused)
    failure = kernel_failure(kernel, request, device, unused_rows=_LARGE)
    if failure is None and kernel_failure(kernel, request, device, unused_rows=torch.nan):
        kernel = TeKernel(fused, zero_unused_rows=True)
        failure = kernel_failure(kernel, request, device, unused_rows=torch.nan)
    return kernel if failure is None else f"it fails its self-test on this device: {failure}"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
