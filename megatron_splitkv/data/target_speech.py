"""The target's own words: greedy or sampled continuations of prompts, in batches.

A sampled token is the largest of (logits / temperature + Gumbel noise), where the noise is keyed by
the prompt's own key and the place of the token in its response. The draw therefore depends neither
on the batch that the prompt is in nor on what was drawn before. (As with greedy decoding, what can
move is the last bits of the logits: a batch of another width adds in another order.)
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import Progress, import_transformers, silent


def respond(
    model: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    *,
    batch_size: int,
    stop_token_ids: Iterable[int] = (),
    temperature: float = 0.0,
    sample_keys: Sequence[tuple[int, ...]] = (),
    progress: Progress = silent,
) -> list[torch.Tensor]:
    """The target's own continuation of each prompt.

    Prompts of a batch are of similar length, padded on the left and masked. Nothing of the target's
    generation config (penalties, top-k) takes part: the distribution is the bare one that drafters
    are verified against.

    Args:
        model: from `load_target`.
        prompts: token ids, ``[n_i]`` each.
        max_new_tokens: longest response.
        batch_size: prompts decoded together.
        stop_token_ids: ids that end a response (kept as its last token).
        temperature: 0 is greedy.
        sample_keys: of the draws when sampling, one a prompt: (seed, number of the prompt, turn).
            All of one length; each number from 0 to 2**32 - 1.
        progress: told the prompts done.

    Returns:
        Responses without their prompts, in the order of `prompts`.

    Raises:
        ConfigError: a negative temperature, or not one key for each prompt when sampling.
    """
    if temperature < 0:
        raise ConfigError(f"temperature {temperature} is negative; give 0 (greedy) or more")
    if temperature > 0 and len(sample_keys) != len(prompts):
        raise ConfigError(
            f"{len(sample_keys)} sample keys for {len(prompts)} prompts; give one for each"
        )
    stop = sorted(stop_token_ids)
    # Padding is masked and cut away again: any id does, an ending one lets finished rows idle.
    pad = stop[0] if stop else 0
    generation = import_transformers().GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad,
        bos_token_id=pad,
    )
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].numel(), i))
    responses: dict[int, torch.Tensor] = {}
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        ids = pad_sequence(
            [prompts[i] for i in batch], batch_first=True, padding_value=pad, padding_side="left"
        )
        width = ids.shape[1]
        padding = width - torch.tensor([[prompts[i].numel()] for i in batch])
        mask = (torch.arange(width) >= padding).long()
        processors = []
        if temperature > 0:
            keys = [sample_keys[i] for i in batch]
            processors.append(GumbelSampling(keys, temperature, width))
        with torch.inference_mode(), _generation_config(model, generation):
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                logits_processor=processors,
            )
        for row, i in enumerate(batch):
            responses[i] = _until_stop(output[row, width:].cpu(), stop)
        progress(len(responses), len(order))
    return [responses[i] for i in range(len(prompts))]


class GumbelSampling:
    """Turns greedy decoding into sampling: a logits processor of transformers.

    Args:
        keys: one a row of the batch.
        temperature: above 0.
        prompt_width: tokens of the padded prompts.
    """

    def __init__(
        self, keys: Sequence[tuple[int, ...]], temperature: float, prompt_width: int
    ) -> None:
        words = [np.random.SeedSequence(key).generate_state(1, np.uint64)[0] for key in keys]
        self._keys = torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))
        self._temperature = temperature
        self._width = prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores whose largest entry is the drawn token.

        Shape:
            input_ids ``[batch, prompt_width + tokens so far]``, scores and result ``[batch, V]``.
        """
        place = input_ids.shape[1] - self._width
        noise = keyed_gumbel(self._keys.to(scores.device), place, scores.shape[1])
        return scores.double() / self._temperature + noise


def keyed_gumbel(keys: torch.Tensor, place: int, size: int) -> torch.Tensor:
    """Standard Gumbel noise as a function of (key, place, column).

    Args:
        keys: one a row.
        place: of the token in its response.
        size: columns.

    Shape:
        keys int64 ``[rows]``, result float64 ``[rows, size]``.
    """
    columns = torch.arange(size, device=keys.device)
    bits = _mixed(_mixed(_mixed(keys + place)[:, None] + columns))
    # 53 bits, in the middle of their steps: neither 0 nor 1.
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 after one step of its counter, on int64 that wrap around.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64)


@contextmanager
def _generation_config(model: Any, config: Any) -> Iterator[None]:
    """Put the target's own config aside: it would fill in whatever ours leaves open."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _until_stop(response: torch.Tensor, stop: Sequence[int]) -> torch.Tensor:
    if not stop:
        return response.clone()
    hits = torch.isin(response, torch.tensor(stop)).nonzero()
    return (response[: int(hits[0]) + 1] if len(hits) else response).clone()
