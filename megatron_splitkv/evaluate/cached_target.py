"""The target model as decoding sees it: one text, a KV cache, taps on a few layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_splitkv.data.target import import_transformers, tapped_layers


class CachedTarget:
    """A target in the middle of one text.

    Args:
        model: a Hugging Face causal language model, from `data.target.load_target`.
        collect: features of the last forward pass, from `data.target.tapped_layers`.
    """

    def __init__(self, model: Any, collect: Callable[[], torch.Tensor]) -> None:
        self._model = model
        self._collect = collect
        # With the configuration, layers with a sliding window get their own kind of cache; past
        # recording lets these be cropped after they have wrapped.
        self._cache = import_transformers().DynamicCache(config=model.config)
        self._cache.activate_past_recording()

    @property
    def length(self) -> int:
        """Tokens of the text that the cache holds."""
        return int(self._cache.get_seq_length())

    def forward(
        self, tokens: Sequence[int], *, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to the text.

        Args:
            tokens: what follows the cached ones.
            last_only: compute logits of the last token only.

        Returns:
            Logits of what follows each token, and the tokens' features.

        Shape:
            logits ``[n, V]`` or ``[1, V]``, features ``[n, C * d]``.
        """
        ids = torch.tensor([list(tokens)], device=self._model.device)
        start = self.length
        positions = torch.arange(start, start + len(tokens), device=ids.device)[None]
        with torch.inference_mode():
            # By position: ids, mask, positions, cache. Transformers 5 renames the cache's keyword
            # (`past_key_values`, `cache`) on the way, its place has always been the fourth.
            logits = self._model(
                ids, None, positions, self._cache, use_cache=True, logits_to_keep=int(last_only)
            ).logits[0]
        return logits, self._collect()[0]

    def prefill(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Read a prompt; return the first new token and the prompt's features."""
        logits, features = self.forward(prompt, last_only=True)
        self.crop(len(prompt))
        return int(logits[-1].argmax()), features

    def verify(self, block: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Read a block; return the target's own token after each of its tokens, and features.

        The block stays in the cache: `crop` away what is not kept.
        """
        logits, features = self.forward(block)
        return logits.argmax(dim=-1).tolist(), features

    def crop(self, length: int) -> None:
        """Forget the text from position `length` on."""
        # Counted from the end: absolute lengths are refused by recent transformers. Also called
        # when there is nothing to remove, because sliding layers trim their window here.
        self._cache.crop(length - self.length)


@contextmanager
def target_texts(
    model: Any, target_layer_ids: Sequence[int]
) -> Iterator[Callable[[], CachedTarget]]:
    """Tap a target and hand out a function that starts a new text.

    Args:
        model: from `data.target.load_target`.
        target_layer_ids: 0-based layer outputs that the drafter reads.

    Yields:
        ``start()``: a `CachedTarget` with an empty cache. One text at a time.
    """
    with tapped_layers(model, target_layer_ids) as collect:
        yield lambda: CachedTarget(model, collect)
