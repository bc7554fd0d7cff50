"""Hidden states of a pack on P ranks are those of one run over each document."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.target import load_target
from megatron_splitkv.online.hf_target import HFTarget
from tests.data.targets import random_target
from tests.drafter.harness import TINY
from tests.online.tiny import info, random_documents, save_target

LENGTHS = (40, 31, 1, 57, 9)
CU_SEQLENS = np.append(0, np.cumsum(LENGTHS)).astype(np.int64)
TOKENS = torch.cat(random_documents(LENGTHS)).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_target(folder)


@pytest.fixture(scope="module")
def meta(folder: Path) -> StoreMeta:
    return StoreMeta(info(folder), TINY.target_layer_ids, final_hidden=True)


@pytest.fixture(scope="module")
def expected(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Every document alone, by transformers' own list of hidden states."""
    features, finals = [], []
    for ids in torch.from_numpy(TOKENS).split(LENGTHS):
        with torch.no_grad():
            hidden = model(ids[None], output_hidden_states=True).hidden_states
        features.append(torch.cat([hidden[i + 1][0] for i in TINY.target_layer_ids], dim=-1))
        finals.append(hidden[-1][0])
    return torch.cat(features), torch.cat(finals)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    if expected.numel():
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("cp_size", [1, 2, 3, 7])
def test_ranks_together_have_every_row(
    model: Any, meta: StoreMeta, expected: tuple[torch.Tensor, torch.Tensor], cp_size: int
) -> None:
    target = HFTarget(model, meta, cp_size=cp_size, final_hidden=True)
    source = target.source(CU_SEQLENS)
    seen = 0
    for rank in range(cp_size):
        features, final = target.states(TOKENS, CU_SEQLENS, rank)
        assert final is not None
        rows = torch.from_numpy(source.rows(rank))
        assert features.shape == (rows.numel(), 64)
        assert final.shape == (rows.numel(), 32)
        _assert_close(features, expected[0][rows])
        _assert_close(final, expected[1][rows])
        seen += rows.numel()
    assert seen == CU_SEQLENS[-1]
    assert (cp_size <= 5) == all(source.num_rows(rank) for rank in range(cp_size))


def test_what_comes_out_may_be_trained_on(model: Any, meta: StoreMeta) -> None:
    """No gradients of its own, and no inference tensor, which autograd could not save."""
    features, final = HFTarget(model, meta, cp_size=1, final_hidden=False).states(
        TOKENS, CU_SEQLENS, 0
    )
    assert final is None
    assert not features.requires_grad
    assert not features.is_inference()
    weight = torch.ones(64, requires_grad=True)
    (features * weight).sum().backward()
    torch.testing.assert_close(weight.grad, features.sum(0))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_features_have_the_dtype_of_the_store(model: Any, meta: StoreMeta) -> None:
    whole = HFTarget(model, meta, cp_size=1, final_hidden=True).states(TOKENS, CU_SEQLENS, 0)
    half = HFTarget(model, replace(meta, dtype="bfloat16"), cp_size=1, final_hidden=True)
    for fp32, bf16 in zip(whole, half.states(TOKENS, CU_SEQLENS, 0), strict=True):
        assert bf16 is not None
        assert fp32 is not None
        assert torch.equal(bf16, fp32.bfloat16())


def test_documents_longer_than_a_pass_are_read_in_chunks(
    model: Any, meta: StoreMeta, expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    target = HFTarget(model, meta, cp_size=2, final_hidden=True, batch_tokens=25)
    source, longest = target.source(CU_SEQLENS), []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: longest.append((args[0] if args else kwargs["input_ids"]).numel()),
        with_kwargs=True,
    )
    try:
        for rank in range(2):
            states = target.states(TOKENS, CU_SEQLENS, rank)
            rows = torch.from_numpy(source.rows(rank))
            for mine, every in zip(states, expected, strict=True):
                assert mine is not None
                _assert_close(mine, every[rows])
    finally:
        hook.remove()
    assert max(longest) == 25


def test_long_documents_of_a_target_that_cannot_read_chunks_are_refused_before_they_come(
    model: Any, meta: StoreMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepcopy(model)  # a model is probed once, and the tests before this one have
    decoder = type(model.get_decoder())
    forward = decoder.forward

    def forgetful(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, input_ids, use_cache=False)

    monkeypatch.setattr(decoder, "forward", forgetful)
    HFTarget(model, meta, cp_size=1, final_hidden=False, longest=4096)
    with pytest.raises(ConfigError, match="the longest has 4097 tokens, more than one pass of 4"):
        HFTarget(model, meta, cp_size=1, final_hidden=False, longest=4097)


def test_documents_that_rope_does_not_let_it_read_are_refused(meta: StoreMeta) -> None:
    target = random_target("phi3")
    HFTarget(target, meta, cp_size=1, final_hidden=False, longest=4096)
    with pytest.raises(ConfigError) as error:
        HFTarget(target, meta, cp_size=1, final_hidden=False, longest=4097)
    assert str(error.value) == (
        "the target's RoPE (longrope) does not let it read a document of more than 4096 tokens in "
        "chunks, and the longest has 4097; train from a feature store prepared with --batch-tokens "
        "4097, or cut with `splitkv prepare --sequence-length 4096`"
    )
    target.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ConfigError, match="depends on what it read before"):
        HFTarget(target, meta, cp_size=1, final_hidden=False, longest=1)


def test_layers_that_the_target_has_not_are_refused(model: Any, meta: StoreMeta) -> None:
    deeper = replace(meta, target=replace(meta.target, num_layers=9), target_layer_ids=(1, 7))
    with pytest.raises(ConfigError, match="layer 7 does not exist: the target has 4 layers"):
        HFTarget(model, deeper, cp_size=1, final_hidden=False)


def test_short_layers_weigh_long_documents_more(model: Any, meta: StoreMeta) -> None:
    """A layer's 9,296 weights over 32 columns: attention costs as much from 290 tokens on."""
    target = HFTarget(model, meta, cp_size=2, final_hidden=False)
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32 + 2 * 8
    assert target._linear_length == layer // 32


def test_logits_that_are_more_than_the_head_are_refused(
    model: Any, meta: StoreMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(model), "get_output_embeddings", lambda self: lambda hidden: 2 * self.lm_head(hidden)
    )
    HFTarget(model, meta, cp_size=1, final_hidden=False)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits"):
        HFTarget(model, meta, cp_size=1, final_hidden=True)
