"""Transformer Engine's own Python above a stand-in for its compiled part, for any version.

The Python of a release is in a wheel without binaries; it is imported from there as it is. What it
calls, `transformer_engine_torch`, is replaced by enumerations with the names that it uses and two
functions that record their positional arguments and let the emulator compute.
"""

import ast
import enum
import importlib
import importlib.machinery
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.attention.thd_emulator import BACKEND, ThdEmulator

VERSIONS = ("2.8.0", "2.13.0", "2.20.2")
NEWEST = VERSIONS[-1]

_FUSED_ATTENTION = "transformer_engine/pytorch/cpp_extensions/fused_attn.py"
_CONSTANTS = "transformer_engine/pytorch/constants.py"
_ENUMERATION = re.compile(r"(?:tex\.)?(NVTE_\w+|DType|FP8\w+Tensors)")


def wheel_of(version: str) -> Path:
    """The wheel without binaries; skips the test where the environment has none."""
    path = Path(sys.prefix, "te-wheels", f"transformer_engine-{version}-py3-none-any.whl")
    if not path.is_file():
        pytest.skip(f"no {path.name} in {path.parent}: tools/environment.sh downloads it")
    return path


def source_of(version: str, name: str = _FUSED_ATTENTION) -> str:
    with zipfile.ZipFile(wheel_of(version)) as wheel:
        return wheel.read(name).decode()


@dataclass(frozen=True)
class CompiledCall:
    """One call of the compiled part: what Transformer Engine calls each argument, and its value."""

    names: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def named(self) -> dict[str, Any]:
        return dict(zip(self.names, self.values, strict=True))


@contextmanager
def stubbed_transformer_engine(
    version: str, emulator: ThdEmulator
) -> Iterator[dict[str, list[CompiledCall]]]:
    """Have `version` importable and the emulator below it; yields the record of compiled calls."""
    record: dict[str, list[CompiledCall]] = {"fused_attn_fwd": [], "fused_attn_bwd": []}
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0].startswith("transformer_eng")}
    with mock.patch.dict(sys.modules):
        for name in kept:
            del sys.modules[name]
        sys.modules["transformer_engine_torch"] = _compiled_part(version, emulator, record)
        for package in ("", ".pytorch", ".pytorch.cpp_extensions"):
            module = ModuleType(f"transformer_engine{package}")
            folders = module.__name__.replace(".", "/")
            module.__path__ = [f"{wheel_of(version)}/{folders}"]
            sys.modules[module.__name__] = module
        for quantizers in ("quantized_tensor", "tensor", "tensor.quantized_tensor"):
            module = ModuleType(f"transformer_engine.pytorch.{quantizers}")
            module.Quantizer = object  # type: ignore[attr-defined]
            sys.modules[module.__name__] = module
        importlib.invalidate_caches()
        yield record


def _compiled_part(
    version: str, emulator: ThdEmulator, record: dict[str, list[CompiledCall]]
) -> ModuleType:
    module = ModuleType("transformer_engine_torch")
    members: dict[str, dict[str, int]] = {}
    for source in (source_of(version), source_of(version, _CONSTANTS)):
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or node.attr[0] not in "NFGk":
                continue  # else a method
            if found := _ENUMERATION.fullmatch(ast.unparse(node.value)):
                values = members.setdefault(found[1], {})
                values.setdefault(node.attr, len(values))
    for name, values in members.items():
        setattr(module, name, enum.IntEnum(name, values))
    for function in ("fused_attn_fwd", "fused_attn_bwd"):
        names = _names_of_arguments(source_of(version), function)
        setattr(module, function, _recorder(function, names, emulator, record))
    return module


def _names_of_arguments(source: str, function: str) -> tuple[str, ...]:
    """What Transformer Engine passes to the compiled function, by the innermost name of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tex.{function}":
            return tuple(
                ast.unparse(a.slice if isinstance(a, ast.Subscript) else a) for a in node.args
            )
    raise AssertionError(f"no call of tex.{function}")


def _recorder(
    function: str,
    names: tuple[str, ...],
    emulator: ThdEmulator,
    record: dict[str, list[CompiledCall]],
) -> Any:
    def compiled(*values: Any) -> list[Any]:
        call = CompiledCall(names, values)
        record[function].append(call)
        given = call.named
        keywords = {
            name: given[name]
            for name in (
                *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v"),
                *("fake_dtype", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "attn_scale"),
                "dropout",
            )
        }
        keywords |= {
            "fused_attention_backend": BACKEND,
            "qkv_layout": _spelt(given["qkv_layout"], "NVTE_"),
            "attn_mask_type": _spelt(given["attn_mask_type"], "NVTE_", "_MASK"),
            # Before there were formats of outputs, they followed the layout of the inputs.
            "o_format": _spelt(given["o_format"], "NVTE_") if "o_format" in given else "thd",
        }
        if function == "fused_attn_fwd":
            out, aux = emulator.fused_attn_fwd(given["is_training"], **keywords)
            return [out, *aux]
        is_new = "do_format" in given
        return emulator.fused_attn_bwd(
            o=given["o"],
            d_o=given["d_o"],
            aux_ctx_tensors=given["aux_ctx_tensors"],
            deterministic=given["deterministic"],
            do_format=_spelt(given["do_format"], "NVTE_") if is_new else "thd",
            dqkv_layout=_spelt(given["dqkv_layout"], "NVTE_") if is_new else "thd_thd_thd",
            **keywords,
        )

    return compiled


def _spelt(member: enum.IntEnum, prefix: str, suffix: str = "") -> str:
    """``NVTE_THD_THD_THD`` -> ``thd_thd_thd``."""
    return member.name.removeprefix(prefix).removesuffix(suffix).lower()
