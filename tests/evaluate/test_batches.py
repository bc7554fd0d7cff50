"""Texts of different lengths decoded together are the texts decoded one by one."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.evaluate import DraftModel, EvaluationPrompt, evaluate_drafter
from megatron_splitkv.evaluate.cached_target import CachedTarget, can_batch, target_texts
from megatron_splitkv.evaluate.drafters import ModelDrafter
from megatron_splitkv.evaluate.heads import DFlashHead
from tests.evaluate.models import (
    DRAFTER,
    decode_greedily,
    decode_speculatively,
    prompts,
    random_zlab_tensors,
    tiny_target,
)

SLIDING = replace(DRAFTER, layer_types=("sliding_attention", "full_attention"), sliding_window=9)


def ragged(count: int) -> list[list[int]]:
    """Prompts from 3 to 50 tokens, long and short ones mixed."""
    lengths = [3, 50, 11, 27, 8, 33, 19, 12]
    return [prompts(1, seed=i, length=lengths[i])[0] for i in range(count)]


def random_tokens(count: int, seed: int) -> list[int]:
    return prompts(1, seed=seed, length=count)[0]


class Checked:
    """A `CachedTarget` whose every answer is held against a pass over the whole text."""

    def __init__(self, model: Any, target: CachedTarget) -> None:
        self.model, self.target = model, target
        self.texts: list[list[int]] = []

    def whole(self, tokens: list[int], last: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
            )
        features = [out.hidden_states[i + 1][0, -last:] for i in DRAFTER.target_layer_ids]
        return out.logits[0, -last:], torch.cat(features, dim=-1)

    def join(self, prompt: list[int]) -> None:
        self.texts.append(prompt)
        logits, features = self.target.read(prompt)
        expected, rows = self.whole(prompt, len(prompt))
        torch.testing.assert_close(logits, expected[-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features, rows, rtol=1e-4, atol=1e-4)

    def step(self, sizes: list[int], keep: list[int], texts: list[int]) -> None:
        blocks = [random_tokens(size, seed=size + 7 * i) for i, size in enumerate(sizes)]
        logits, features = self.target.forward(blocks)
        for i, block in enumerate(blocks):
            expected, rows = self.whole(self.texts[i] + block, len(block))
            torch.testing.assert_close(logits[i, : len(block)], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(features[i, : len(block)], rows, rtol=1e-4, atol=1e-4)
        self.target.keep(keep, texts)
        self.texts = [self.texts[i] + blocks[i][: keep[i]] for i in texts]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding", "mistral", "gemma3", "nested"])
def test_uneven_texts_see_what_whole_passes_see(kind: str) -> None:
    model = tiny_target(kind)
    with target_texts(model, DRAFTER.target_layer_ids) as new_texts:
        texts = Checked(model, new_texts())
        for length in (3, 30, 11):
            texts.join(random_tokens(length, seed=length))
        texts.step([4, 2, 4], keep=[1, 2, 4], texts=[0, 1, 2])
        texts.step([3, 3, 3], keep=[3, 1, 2], texts=[0, 2])  # the longest one leaves
        texts.step([5, 1], keep=[2, 1], texts=[0, 1])
        texts.join(random_tokens(25, seed=25))
        texts.step([1, 6, 4], keep=[1, 0, 4], texts=[1, 2])
        texts.step([6, 6], keep=[6, 6], texts=[0, 1])
        texts.step([2, 2], keep=[1, 2], texts=[1])
        texts.step([3], keep=[1], texts=[0])  # by itself again
        texts.step([2], keep=[2], texts=[0])


def test_recurrent_layers_take_rejected_blocks_back() -> None:
    model = tiny_target("qwen3_5")
    assert not can_batch(model)
    with target_texts(model, DRAFTER.target_layer_ids) as new_texts:
        text = Checked(model, new_texts())
        text.join(random_tokens(11, seed=1))
        for size, kept in ((4, 2), (3, 3), (3, 1), (1, 1)):
            text.step([size], keep=[kept], texts=[0])
        with pytest.raises(ConfigError, match=r"LinearAttentionLayer .* use --batch-size 1"):
            text.join(random_tokens(5, seed=2))


@pytest.mark.parametrize("config", [DRAFTER, SLIDING], ids=["full", "sliding drafter"])
@torch.inference_mode()
def test_uneven_texts_draft_what_each_drafts_alone(config: DFlashConfig) -> None:
    model = DraftModel.from_tensors(config, random_zlab_tensors(config))
    generator = torch.Generator().manual_seed(2)

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=generator)

    alone = [model.new_cache(60) for _ in range(3)]
    together = model.new_cache(60)
    together.append(model.new_cache(20))
    together.append(model.new_cache(40))
    for counts, slots, staying in (
        ([3, 14, 25], [6, 4, 6], [0, 1, 2]),
        ([1, 2, 6], [6, 2, 3], [0, 2]),
        ([5, 1], [2, 6], [1]),
        ([4], [5], [0]),
    ):
        b = max(slots)
        features = [rows(count, config.feature_width) for count in counts]
        blocks = [rows(b, config.hidden_size) for _ in slots]
        model.extend_context(torch.cat(features), together, counts)
        hidden = model.draft(torch.cat(blocks), together, slots).unflatten(0, (-1, b))
        for cache, new, block, own, found in zip(
            alone, features, blocks, slots, hidden, strict=True
        ):
            model.extend_context(new, cache)
            expected = model.draft(block[:own], cache)
            torch.testing.assert_close(found[:own], expected, rtol=1e-4, atol=1e-5)
        assert hidden.isfinite().all()
        together.select(staying)
        alone = [alone[i] for i in staying]
        assert together.lengths == [cache.length for cache in alone]


@pytest.mark.parametrize(("kind", "config"), [("qwen3", DRAFTER), ("sliding", SLIDING)])
def test_a_batch_decodes_what_single_texts_decode(kind: str, config: Any) -> None:
    target = tiny_target(kind)
    model = DraftModel.from_tensors(config, random_zlab_tensors(config))
    with target_texts(target, config.target_layer_ids) as new_texts:
        (longest,) = decode_greedily(new_texts(), ragged(1), max_new_tokens=16)
        # A token from the middle of one text: it ends early, and so may others elsewhere.
        options: Any = {"max_new_tokens": 16, "stop_token_ids": {longest.new_tokens[9]}}
        singly = decode_greedily(new_texts(), ragged(4), **options)
        together = decode_greedily(new_texts(), ragged(4), batch_size=3, **options)
        for one, other in zip(singly, together, strict=True):
            assert one.new_tokens == other.new_tokens
            torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-4)
            assert one.gaps == pytest.approx(other.gaps, abs=1e-4)

        def speculative(batch_size: int) -> list[Any]:
            drafter = ModelDrafter(model, DFlashHead(config), target)
            return decode_speculatively(
                new_texts(), drafter, ragged(4), num_proposals=5, batch_size=batch_size, **options
            )

        drafted = speculative(1)
        assert drafted == speculative(3)
        assert [text.new_tokens for text in drafted] == [text.new_tokens for text in singly]
    assert len({len(text.new_tokens) for text in drafted}) > 1, "all texts ended together"


def test_every_batch_size_gives_the_same_numbers() -> None:
    """Scaled embeddings and capped logits on the way, and no warning of anyone's."""
    config = replace(DRAFTER, input_embedding_scale=0.5, final_logit_softcapping=3.0)
    model = DraftModel.from_tensors(config, random_zlab_tensors(config))
    target = tiny_target()
    tokens = [EvaluationPrompt(f"p{i}", prompt) for i, prompt in enumerate(ragged(4))]

    def evaluate(batch_size: int | None) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = evaluate_drafter(
                model, target, tokens, max_new_tokens=6, batch_size=batch_size
            )
        return {name: value for name, value in result.to_json().items() if name != "seconds"}

    expected = evaluate(1)
    assert expected["greedy_equal"]
    assert expected["truncated"] == {"prompts": 0, "share": 0, "tokens": 0}
    assert evaluate(3) == evaluate(None) == expected
    with pytest.raises(ConfigError, match="batch size is 0, it must be at least 1"):
        evaluate(0)
