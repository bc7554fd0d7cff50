"""What `probe` runs in processes of their own: each function looks at one thing and answers facts.

Arguments are strings, answers what `json` can write. Whatever an import or a call raises is the
answer of the process that it ends, unless it is the very thing that is looked for.
"""

import importlib
import sys
import traceback
from typing import Any

from megatron_splitkv.doctor.loopback import loopback

__all__ = ["apex", "environment", "kernels", "loopback", "megatron", "transformer_engine"]

# What is imported of apex, for what Megatron uses it (`packages.APEX_PARTS` says that to people).
APEX_MODULES = {
    "FusedAdam": ("apex.optimizers", "amp_C"),
    "multi-tensor operations": ("amp_C", "apex.multi_tensor_apply"),
    "norms": ("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda"),
    "gradient accumulation fusion": ("fused_weight_gradient_mlp_cuda",),
}
PACKAGES = ("megatron-core", "triton", "psutil", "numpy", "safetensors", "transformers")


def environment() -> dict[str, Any]:
    """Versions, and what torch says of the GPUs."""
    import torch

    from megatron_splitkv import compat

    devices = [
        {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "gigabytes": round(properties.total_memory / 1e9, 1),
        }
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return {
        "packages": {name: compat.installed_version(name) for name in PACKAGES},
        "importable": [
            name for name in ("transformer_engine", "apex") if compat.is_importable(name)
        ],
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": _dotted_cudnn() if devices else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
            "has_gloo": torch.distributed.is_gloo_available(),
        },
        "devices": devices,
    }


def _dotted_cudnn() -> str | None:
    import torch

    from megatron_splitkv.attention.kernels.rules import decode_cudnn_version

    number = torch.backends.cudnn.version()
    return None if number is None else ".".join(map(str, decode_cudnn_version(number)))


def megatron() -> dict[str, Any]:
    """Whether Megatron can be imported, and whose optimizer it then takes."""
    from megatron_splitkv import compat
    from megatron_splitkv.config import ConfigError

    try:
        if compat.installed_version("megatron-core") is not None:
            importlib.import_module("megatron.core")  # what it lacks is not Megatron
        compat.check_environment()
        importlib.import_module("megatron.training.training")
        optimizer = importlib.import_module("megatron.core.optimizer").Adam
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:
        # Megatron is content without Transformer Engine and apex, but not with half of them.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        culprits = (
            name
            for name in ("transformer_engine", "apex")
            if name in str(error) or any(f"/{name}/" in file for file in files)
        )
        return {"error": f"{error!r}", "culprit": next(culprits, None)}
    return {
        "version": compat.megatron_core_version(),
        "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
    }


def transformer_engine() -> dict[str, Any]:
    """Whether Transformer Engine can be imported, its version, and whether its kernels fit."""
    from megatron_splitkv import compat
    from megatron_splitkv.config import ConfigError

    version = compat.installed_version("transformer-engine")
    try:
        package = importlib.import_module("transformer_engine")
        version = str(getattr(package, "__version__", version))
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a binary that does not fit raises what it likes
        return {"version": version, "error": f"{error!r}"}
    try:
        compat.fused_attention()
    except ConfigError as error:
        return {"version": version, "refused": str(error)}
    return {"version": version}


def apex() -> dict[str, Any]:
    """What of apex can be imported: for every part None, or why not."""
    parts: dict[str, str | None] = {}
    for part, modules in APEX_MODULES.items():
        parts[part] = None
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                parts[part] = f"{error!r}"
                break
    package = sys.modules.get("apex")
    return {"version": getattr(package, "__version__", None), "parts": parts}


def kernels(num_heads: str, num_key_heads: str, width: str) -> dict[str, Any]:
    """Which kernel ``auto`` takes for bf16 tensors on the first device, and why not the others.

    On a GPU those that ``auto`` may take are also run once: Transformer Engine's self-test.
    """
    import warnings

    import torch

    from megatron_splitkv.attention.kernels.rules import Request, kernel_report, machine_of
    from megatron_splitkv.attention.kernels.selection import find_kernel, select_kernel

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    request = Request(torch.bfloat16, int(num_heads), int(num_key_heads), int(width))
    report = kernel_report(machine_of(device), request)
    tested: dict[str, str | None] = {}
    if device.type == "cuda":
        from megatron_splitkv.attention.kernels.self_test import kernel_failure

        for name in ("te", "flash"):
            if report[name] is not None:
                continue
            kernel = find_kernel(name, device, request)  # runs the self-test of `te`
            tested[name] = (
                kernel
                if isinstance(kernel, str)
                else kernel_failure(kernel, request, device, unused_rows=1e4)
            )
    q = torch.empty(1, request.num_heads, request.width, dtype=request.dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        chosen = select_kernel("auto", q, request.num_key_heads)
    name = getattr(chosen, "__name__", type(chosen).__module__)
    return {
        "device": str(device),
        "chosen": name.rpartition(".")[2],
        "refusals": report,
        "self_test": tested,
    }
