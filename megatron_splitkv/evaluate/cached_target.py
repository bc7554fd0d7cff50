"""The target model as decoding sees it: a few texts at once, a KV cache, taps on a few layers.

Every text has its own length. The cache keeps the texts aligned at their ends, padded on the left,
as a batch of prompts is: inside a text the distance of two slots is the distance of two positions,
so that the model's own causal and sliding masks hold, and one padding mask does the rest. Where
texts keep different numbers of a step's tokens, their columns are shifted to the right again. One
text by itself is never padded, masked or shifted.

Shape legend: n texts, m tokens of the longest block, C tapped layers, d hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_splitkv.data.target import import_transformers
from megatron_splitkv.data.target_states import cache_keyword, tapped_layers
from megatron_splitkv.evaluate.cache_rows import (
    append_rows,
    can_hold_texts,
    is_recurrent,
    keep_columns,
    recurrent_states,
    restore_states,
)


class CachedTarget:
    """A target in the middle of a few texts.

    Args:
        model: a Hugging Face causal language model, from `data.target.load_target`.
        collect: features of the last forward pass, from `data.target_states.tapped_layers`.
    """

    def __init__(self, model: Any, collect: Callable[[], torch.Tensor]) -> None:
        self._model = model
        self._collect = collect
        self._cache_keyword = cache_keyword(model)
        self._cache: Any = None
        self._lengths: list[int] = []
        self._unread = 0  # columns of the last blocks, before `keep`
        self._block: Sequence[int] = ()
        self._states: list[Any] = []  # of recurrent layers, before the last block

    def read(self, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a prompt by itself; its text becomes the last one.

        Args:
            prompt: token ids.

        Returns:
            Logits of the first new token, and the prompt's features.

        Shape:
            logits ``[V]``, features ``[len(prompt), C * d]``.
        """
        # With the configuration, layers with a sliding window get their own kind of cache; past
        # recording lets these be cropped after they have wrapped.
        cache = _new_cache(self._model)
        cache.activate_past_recording()
        logits, features = self._run([prompt], [0], 0, cache, last_only=True)
        cache.crop(0)  # sliding layers trim their window here
        if self._lengths:
            append_rows(self._cache, max(self._lengths), cache, len(prompt))
        else:
            self._cache = cache
        self._lengths.append(len(prompt))
        return logits[0, -1], features[0]

    def forward(self, blocks: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a block in every text; `keep` has to follow.

        Args:
            blocks: token ids; shorter ones are padded, what comes out there means nothing.

        Returns:
            Logits of what follows each token, and the tokens' features.

        Shape:
            logits ``[n, m, V]``, features ``[n, m, C * d]``.
        """
        self._unread = max(map(len, blocks))
        if is_recurrent(self._cache):
            (self._block,), self._states = blocks, recurrent_states(self._cache)
        return self._run(blocks, self._lengths, max(self._lengths), self._cache)

    def join(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Read a prompt as the last text; return its first new token and its features."""
        logits, features = self.read(prompt)
        return int(logits.argmax()), features

    def verify(
        self, blocks: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Sequence[torch.Tensor]]:
        """Read blocks; return the target's own token after each of their tokens, and features."""
        logits, features = self.forward(blocks)
        return logits.argmax(dim=-1).tolist(), features.unbind()

    def keep(self, counts: Sequence[int], texts: Sequence[int]) -> None:
        """Forget the ends of the blocks, and whole texts.

        Args:
            counts: leading tokens of each text's block that stay.
            texts: those that go on, ascending.
        """
        lengths = [old + new for old, new in zip(self._lengths, counts, strict=True)]
        whole = len(texts) == len(lengths)
        if whole and len(set(counts)) == 1:
            self._crop(counts[0])
        elif texts:
            drop = [self._unread - counts[text] for text in texts]
            keep_columns(self._cache, texts, drop, max(lengths[text] for text in texts))
        else:
            self._cache = None
        self._lengths = [lengths[text] for text in texts]
        self._unread = 0

    def _crop(self, count: int) -> None:
        if self._states and count < self._unread:
            # What a recurrent layer has read cannot be taken back, only read again.
            self._cache.crop(-self._unread)
            restore_states(self._cache, self._states)
            self._run([self._block[:count]], self._lengths, max(self._lengths), self._cache)
            self._cache.crop(0)
        else:
            # Counted from the end: absolute lengths are refused by recent transformers.
            self._cache.crop(count - self._unread)
        self._states = []

    def _run(
        self,
        blocks: Sequence[Sequence[int]],
        lengths: Sequence[int],
        width: int,
        cache: Any,
        *,
        last_only: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        m, device = max(map(len, blocks)), self._model.device
        ids = torch.tensor([[*block, *[0] * (m - len(block))] for block in blocks], device=device)
        # Padding repeats the last position: the next one may be beyond the target's last.
        positions = torch.tensor(
            [
                [length + min(i, len(block) - 1) for i in range(m)]
                for length, block in zip(lengths, blocks, strict=True)
            ],
            device=device,
        )
        mask = None
        if min(lengths) < width:
            starts = width - torch.tensor(lengths, device=device)
            mask = (torch.arange(width + m, device=device) >= starts[:, None]).long()
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=int(last_only),
                **{self._cache_keyword: cache},
            ).logits
        return logits, self._collect()


def can_batch(model: Any) -> bool:
    """Whether a target can decode several texts at once.

    Args:
        model: from `data.target.load_target`.
    """
    return can_hold_texts(_new_cache(model))


def _new_cache(model: Any) -> Any:
    return import_transformers().DynamicCache(config=model.config)


@contextmanager
def target_texts(
    model: Any, target_layer_ids: Sequence[int]
) -> Iterator[Callable[[], CachedTarget]]:
    """Tap a target and hand out a function that starts new texts.

    Args:
        model: from `data.target.load_target`.
        target_layer_ids: 0-based layer outputs that the drafter reads.

    Yields:
        ``start()``: a `CachedTarget` without a text. One at a time.
    """
    with tapped_layers(model, target_layer_ids) as collect:
        yield lambda: CachedTarget(model, collect)
