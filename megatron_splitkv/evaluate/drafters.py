"""What proposes tokens: a drafter, and the n-gram repeat that every drafter has to beat."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from megatron_splitkv.evaluate.context_cache import ContextCache
from megatron_splitkv.evaluate.draft_model import DraftModel
from megatron_splitkv.evaluate.heads import ProposalHead

_LONGEST_NGRAM = 4


class Drafter(Protocol):
    """Proposes continuations of a few texts at once; texts come and go."""

    def join(self, max_length: int) -> None:
        """A new text of at most `max_length` tokens becomes the last one."""

    def propose(
        self,
        texts: Sequence[Sequence[int]],
        features: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Propose what follows the known texts.

        Args:
            texts: each whole text so far; its last token is the anchor.
            features: tapped target features of each text's tokens before the anchor that are new
                since its last call, ``[rows, C * d]``.
            counts: tokens wanted of each at most, at least one.
        """

    def keep(self, texts: Sequence[int]) -> None:
        """Only these texts go on, ascending."""


class ModelDrafter:
    """A drafter with the embedding and the head of its target.

    Args:
        model: the drafter's backbone.
        head: its kind's head.
        target: the Hugging Face model that it drafts for.
        use_context: False feeds zeros for the target's features: how much of the acceptance comes
            from the block alone?
    """

    def __init__(
        self, model: DraftModel, head: ProposalHead, target: Any, *, use_context: bool = True
    ) -> None:
        self._model, self._head = model, head
        self._embedding: torch.Tensor = target.get_input_embeddings().weight
        self._vocabulary: torch.Tensor = target.get_output_embeddings().weight
        self._use_context = use_context
        self._cache: ContextCache | None = None

    def join(self, max_length: int) -> None:
        cache = self._model.new_cache(max_length)
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.append(cache)

    @torch.inference_mode()
    def propose(
        self,
        texts: Sequence[Sequence[int]],
        features: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> list[list[int]]:
        assert self._cache is not None, "join() comes first"
        config, device = self._model.config, self._embedding.device
        context = torch.cat(list(features))
        if not self._use_context:
            context = torch.zeros_like(context)
        self._model.extend_context(context, self._cache, [len(rows) for rows in features])
        slots = [count + config.first_trained_slot for count in counts]
        b = max(slots)
        anchors = torch.tensor([tokens[-1] for tokens in texts], device=device)
        blocks = anchors.new_full((len(texts), b), config.mask_token_id)
        blocks[:, 0] = anchors
        embedded = F.embedding(blocks.flatten(), self._embedding) * config.input_embedding_scale
        hidden = self._model.draft(embedded, self._cache, slots).unflatten(0, (len(texts), b))
        found = self._head.propose(hidden, anchors, self._embedding, self._vocabulary).tolist()
        return [tokens[:count] for tokens, count in zip(found, counts, strict=True)]

    def keep(self, texts: Sequence[int]) -> None:
        assert self._cache is not None, "join() comes first"
        if texts:
            self._cache.select(texts)
        else:
            self._cache = None


class NGramDrafter:
    """Repeats what followed the last occurrence of the text's ending: prompt lookup.

    The longest ending of at most four tokens that occurred before counts, its latest occurrence
    first. Where the copy runs into the end of the text it goes on with its own beginning, so that
    a repeated pattern is continued.
    """

    def join(self, max_length: int) -> None:
        pass

    def propose(
        self,
        texts: Sequence[Sequence[int]],
        features: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> list[list[int]]:
        return [_repeat(tokens, count) for tokens, count in zip(texts, counts, strict=True)]

    def keep(self, texts: Sequence[int]) -> None:
        pass


def _repeat(tokens: Sequence[int], count: int) -> list[int]:
    text = np.asarray(tokens, dtype=np.int64)
    for size in range(min(_LONGEST_NGRAM, len(text) - 1), 0, -1):
        # The windows of text[:-1]: every earlier n-gram, overlapping ones too.
        earlier = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        found = np.flatnonzero((earlier == text[-size:]).all(axis=1))
        if found.size:
            copied = text[found[-1] + size :]
            return np.resize(copied, count).tolist()
    return []
