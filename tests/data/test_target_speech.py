"""Responses: greedy ones are plain greedy decoding, sampled ones depend on their key alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.target_speech import GumbelSampling, keyed_gumbel, respond
from tests.data.targets import random_documents, random_target


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return load_target(target_folder)


def _greedy(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    ids = prompt
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["tiny", "mistral", "qwen3_5", "jamba"])
def test_greedy_responses_equal_plain_greedy_decoding(model: Any, kind: str) -> None:
    target = model if kind == "tiny" else random_target(kind)
    prompts = random_documents([5, 12, 3, 8, 12])
    told: list[tuple[int, int]] = []
    responses = respond(
        target,
        prompts,
        10,
        batch_size=3,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(3, 5), (5, 5)]
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.tolist() == _greedy(target, prompt, 10)


def test_a_response_ends_with_its_stop_token(model: Any) -> None:
    prompts = random_documents([5, 12, 3])
    whole = respond(model, prompts, 12, batch_size=3)
    stop = int(whole[0][4])
    stopped = respond(model, prompts, 12, batch_size=3, stop_token_ids=[stop])
    for full, cut in zip(whole, stopped, strict=True):
        full = full.tolist()
        expected = full[: full.index(stop) + 1] if stop in full else full
        assert cut.tolist() == expected
    assert len(stopped[0]) <= 5


def test_the_target_s_generation_config_takes_no_part() -> None:
    target, prompts = random_target("llama"), random_documents([5, 12, 3])
    plain = [_greedy(target, prompt, 12) for prompt in prompts]
    own = target.generation_config
    own.repetition_penalty, own.min_new_tokens = 50.0, 12
    own.eos_token_id, own.pad_token_id = [plain[0][3], plain[1][6]], 7
    responses = respond(target, prompts, 12, batch_size=3)
    assert [response.tolist() for response in responses] == plain
    assert target.generation_config is own


def test_a_draw_depends_neither_on_its_batch_nor_on_its_place(model: Any) -> None:
    prompts, keys = random_documents([5, 12, 3, 8]), [(7, 0), (7, 1), (7, 2), (7, 3)]
    options: dict[str, Any] = {"temperature": 1.5}
    together = respond(model, prompts, 16, batch_size=4, sample_keys=keys, **options)
    torch.manual_seed(99)
    torch.rand(3)
    backwards = respond(model, prompts[::-1], 16, batch_size=2, sample_keys=keys[::-1], **options)
    for a, b in zip(together, backwards[::-1], strict=True):
        assert torch.equal(a, b)
    greedy = respond(model, prompts, 16, batch_size=4)
    assert not any(torch.equal(a, b) for a, b in zip(together, greedy, strict=True))


def test_another_key_is_another_draw(model: Any) -> None:
    (prompt,) = random_documents([5])
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, 1)]
    responses = respond(model, [prompt] * 4, 16, batch_size=4, temperature=1.5, sample_keys=keys)
    assert len({tuple(response.tolist()) for response in responses}) == 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    draws, places = 2000, 20
    keys = [(3, i) for i in range(draws)]
    counts = torch.zeros(6)
    for place in range(places):
        sampling = GumbelSampling(keys, temperature, prompt_width=4)
        ids = torch.zeros(draws, 4 + place, dtype=torch.long)
        picked = sampling(ids, logits.expand(draws, -1)).argmax(-1)
        counts += torch.bincount(picked, minlength=6)
    expected = (logits / temperature).softmax(-1)
    deviation = (counts / (draws * places) - expected).abs()
    # Four standard deviations of 40,000 independent draws.
    assert (deviation <= 4 * (expected * (1 - expected) / (draws * places)).sqrt()).all()


def test_noise_is_keyed_and_standard() -> None:
    keys = torch.tensor([5, -(2**63), 2**63 - 1])
    noise = keyed_gumbel(keys, 3, 100_000)
    assert noise.dtype == torch.float64
    assert torch.isfinite(noise).all()
    assert torch.equal(noise[1:], keyed_gumbel(keys[1:], 3, 100_000))
    assert torch.equal(noise[:, :10], keyed_gumbel(keys, 3, 10))
    assert not torch.equal(noise, keyed_gumbel(keys, 4, 100_000))
    # Mean 0.5772 and variance pi^2 / 6; rows are not correlated.
    assert (noise.mean(1) - 0.5772).abs().max() < 0.02
    assert (noise.var(1) - 1.6449).abs().max() < 0.05
    assert (torch.corrcoef(noise) - torch.eye(3)).abs().max() < 0.02


def test_the_mixer_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567."""
    from megatron_splitkv.data.target_speech import _mixed

    golden = 0x9E3779B97F4A7C15 - 2**64
    seeds = torch.tensor([1234567]) + torch.arange(3) * golden
    assert [int(word) % 2**64 for word in _mixed(seeds)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_bad_options_are_one_clear_line(model: Any) -> None:
    prompts = random_documents([5, 12])
    with pytest.raises(ConfigError, match=r"temperature -0\.1 is negative"):
        respond(model, prompts, 4, batch_size=2, temperature=-0.1)
    with pytest.raises(ConfigError, match="1 sample keys for 2 prompts"):
        respond(model, prompts, 4, batch_size=2, temperature=1.0, sample_keys=[(0, 0)])
