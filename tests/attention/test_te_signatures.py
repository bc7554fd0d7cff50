"""How Transformer Engine is called: keywords against its signatures, and what arrives below."""

import ast
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels.te import TeKernel
from megatron_splitkv.compat import attention_functions
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import LeafLimits, build_staircase
from tests.attention.te_stub import (
    NEWEST,
    VERSIONS,
    CompiledCall,
    source_of,
    stubbed_transformer_engine,
)
from tests.attention.thd_emulator import ThdEmulator

FUNCTIONS = ("fused_attn_fwd", "fused_attn_bwd")
DTYPES = {torch.bfloat16: "TE's bfloat16"}


def signatures_of(version: str, *, without: str = "", besides: str = "") -> SimpleNamespace:
    """The two functions with a release's own parameters, which return their arguments."""
    functions: dict[str, Any] = {"FusedAttnBackend": {"F16_arbitrary_seqlen": "F16"}}
    for node in ast.parse(source_of(version)).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            arguments = node.args
            assert not [*arguments.posonlyargs, *arguments.kwonlyargs]
            keep = len(arguments.args) - len(arguments.defaults)
            defaults = [None] * keep + arguments.defaults
            parameters = [f"{besides}_{node.name}"] if besides else []
            for argument, default in zip(arguments.args, defaults, strict=True):
                if argument.arg != without:
                    text = "" if default is None else f"={ast.unparse(default)}"
                    parameters.append(argument.arg + text)
            exec(f"def {node.name}({', '.join(parameters)}): return locals()", functions)
    return SimpleNamespace(**functions)


@pytest.mark.parametrize("version", VERSIONS)
def test_keywords_fit_the_signature(version: str) -> None:
    fused = compat.bind_fused_attention(signatures_of(version), DTYPES)
    per_call = {name: name for name in attention_functions._PER_CALL} | {
        "fake_dtype": torch.bfloat16
    }
    forward = fused.forward(**per_call, rng_gen="rng_gen")
    backward = fused.backward(
        **per_call, o="o", d_o="d_o", aux_ctx_tensors="aux", deterministic=True
    )
    is_new = "o_format" in forward
    assert is_new == (version == NEWEST)
    assert ("dqkv_dtype" in backward) == (not is_new)
    assert backward.get("dqkv_dtype", DTYPES[torch.bfloat16]) == DTYPES[torch.bfloat16]
    for call in (forward, backward):
        assert call.items() >= per_call.items()
        assert call["fused_attention_backend"] == "F16"
        assert call["qkv_layout"] == "thd_thd_thd"
        assert call.get("o_format", "thd") == "thd"
        assert call.get("do_format", "thd") == "thd"
        assert call.get("dqkv_layout", "thd_thd_thd") == "thd_thd_thd"
        # Left to their defaults, which therefore must stay what they are.
        assert (call["attn_bias_type"], call["attn_mask_type"]) == ("no_bias", "padding")
        assert (call["softmax_type"], call["dropout"]) == ("vanilla", 0.0)
        assert call["window_size"] == (-1, -1)
        assert all(call[name] is None for name in call if name.endswith("_quantizer"))
    assert forward["is_training"] is True
    assert backward["deterministic"] is True
    assert backward["aux_ctx_tensors"] == "aux"


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_forms_are_named(version: str) -> None:
    for name in ("cu_seqlens_kv_padded", "deterministic", "attn_scale"):
        with pytest.raises(ConfigError, match=rf"Transformer Engine has an unknown form.*{name}"):
            compat.bind_fused_attention(signatures_of(version, without=name), DTYPES)
    with pytest.raises(ConfigError, match=r"demands \['sink_fused_attn_fwd'\]"):
        compat.bind_fused_attention(signatures_of(version, besides="sink"), DTYPES)


def test_an_import_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(attention_functions.importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match=r"cannot be imported: OSError.*libcudnn"):
        compat.fused_attention()


@dataclass(frozen=True)
class Compiled:
    """One forward and backward of a small staircase on the newest release."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    carrier: torch.Tensor
    lse: torch.Tensor
    calls: dict[str, list[CompiledCall]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    # Blocks 0, 1 and 3, 4 see documents that begin at keys 3 and 20; block 2 sees nothing.
    key_start, key_end = np.array([3, 3, 0, 20, 20]), np.array([9, 15, 0, 31, 48])
    staircase = build_staircase(key_start, key_end, 16, LeafLimits(0, 0, 0))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(80, 4, 8, generator=generator).bfloat16() for _ in range(3)]
    keys = [torch.randn(50, 2, 8, generator=generator).bfloat16() for _ in range(2)]
    (q, grad_out, carrier), (k, v) = rows, keys
    with stubbed_transformer_engine(NEWEST, ThdEmulator()) as calls:
        kernel = TeKernel(compat.fused_attention())
        _, lse = kernel.forward(q, k, v, staircase, 0.25)
        kernel.backward(grad_out, q, k, v, carrier, lse + 1.0, staircase, 0.25)
    return Compiled(q, k, v, grad_out, carrier, lse + 1.0, calls)


# Both documents' leading rectangles, then what the second block of each sees more.
RANGES = (
    {"cu_q": [32, 64], "cu_kv": [6, 17], "start_q": [0, 48], "start_kv": [3, 20]},
    {"cu_q": [16, 32], "cu_kv": [6, 23], "start_q": [16, 64], "start_kv": [9, 31]},
)


def _assert_ranges(values: tuple[Any, ...], positions: dict[str, int], level: int) -> None:
    expected = RANGES[level]
    end = {"start_q": 80, "start_kv": 50}
    for name, position in positions.items():
        first = [0] if name.startswith("cu") else []
        found, listed = values[position], first + expected[name]
        assert found.dtype == torch.int32
        assert found.tolist() == listed + [end.get(name, listed[-1])] * (33 - len(listed))


def test_what_the_compiled_forward_receives(compiled: Compiled) -> None:
    calls = compiled.calls["fused_attn_fwd"]
    assert len(calls) == 2
    for level, call in enumerate(calls):
        values = call.values
        assert len(values) == 32
        assert values[:6] == (32, 32, True, 0.25, 0.0, True)
        assert [x.name for x in values[6:8]] == ["NVTE_THD_THD_THD", "NVTE_THD"]
        assert values[9].name == "NVTE_NO_BIAS"
        assert values[10].name == "NVTE_PADDING_MASK"
        assert values[11].name == "NVTE_VANILLA_SOFTMAX"
        assert values[12:14] == ((-1, -1), False)
        ranges = {"cu_q": 14, "cu_kv": 15, "start_q": 20, "start_kv": 21}
        _assert_ranges(values, ranges, level)
        assert values[16] is compiled.q
        assert values[17] is compiled.k
        assert values[18] is compiled.v
        assert values[19] is torch.bfloat16
        assert values[22:28] == (None,) * 6  # page tables, quantizers, bias, softmax offset
        assert isinstance(values[28], torch.Generator)
        assert values[30:] == (False, False)


def test_what_the_compiled_backward_receives(compiled: Compiled) -> None:
    calls = compiled.calls["fused_attn_bwd"]
    assert len(calls) == 2
    for level, call in enumerate(calls):
        values = call.values
        assert len(values) == 32
        assert values[:5] == (32, 32, 0.25, 0.0, True)
        formats = ["NVTE_THD_THD_THD", "NVTE_THD", "NVTE_THD", "NVTE_THD_THD_THD"]
        assert [x.name for x in values[5:9]] == formats
        assert values[11].name == "NVTE_NO_BIAS"
        assert values[12].name == "NVTE_PADDING_MASK"
        assert values[13].name == "NVTE_VANILLA_SOFTMAX"
        assert values[14:17] == ((-1, -1), False, False)
        ranges = {"cu_q": 17, "cu_kv": 18, "start_q": 26, "start_kv": 27}
        _assert_ranges(values, ranges, level)
        inputs = (compiled.q, compiled.k, compiled.v, compiled.carrier, compiled.grad_out)
        assert all(x is y for x, y in zip(values[19:24], inputs, strict=True))
        assert values[24] is torch.bfloat16
        statistics, rng_state = values[25]
        assert statistics.dtype == torch.float32
        expected = compiled.lse.masked_fill(compiled.lse == -torch.inf, 0.0).unsqueeze(-1)
        assert torch.equal(statistics, expected)
        assert rng_state.dtype == torch.int64
        assert values[28:] == (None, None, None, False)
