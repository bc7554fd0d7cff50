"""What proposes tokens: a DFlash drafter, and the n-gram repeat that every drafter has to beat."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from megatron_splitkv.evaluate.draft_model import ContextCache, DraftModel

_LONGEST_NGRAM = 4


class Drafter(Protocol):
    """Proposes continuations of one text after another."""

    def start(self, max_length: int) -> None:
        """Begin a new text of at most `max_length` tokens."""

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        """Propose what follows the known text.

        Args:
            tokens: the whole text so far; its last token is the anchor.
            features: tapped target features of the tokens before the anchor that are new since
                the last call, ``[rows, C * d]``.
            count: tokens wanted at most.
        """


class DFlashDrafter:
    """A DFlash drafter with the embedding and the head of its target.

    Args:
        model: the drafter.
        target: the Hugging Face model that it drafts for.
        use_context: False feeds zeros for the target's features: how much of the acceptance comes
            from the block alone?
    """

    def __init__(self, model: DraftModel, target: Any, *, use_context: bool = True) -> None:
        self._model = model
        self._embedding: torch.Tensor = target.get_input_embeddings().weight
        self._head = target.get_output_embeddings()
        self._use_context = use_context
        self._cache: ContextCache | None = None

    def start(self, max_length: int) -> None:
        self._cache = self._model.new_cache(max_length)

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        assert self._cache is not None, "start() comes first"
        if not self._use_context:
            features = torch.zeros_like(features)
        self._model.extend_context(features, self._cache)
        block = [tokens[-1]] + [self._model.config.mask_token_id] * count
        embedded = F.embedding(torch.tensor(block, device=features.device), self._embedding)
        hidden = self._model.draft(embedded, self._cache)[1:]
        return self._head(hidden.to(self._embedding.dtype)).argmax(dim=-1).tolist()


class NGramDrafter:
    """Repeats what followed the last occurrence of the text's ending: prompt lookup.

    The longest ending of at most four tokens that occurred before counts, its latest occurrence
    first. Where the copy runs into the end of the text it goes on with its own beginning, so that
    a repeated pattern is continued.
    """

    def start(self, max_length: int) -> None:
        pass

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        text = np.asarray(tokens, dtype=np.int64)
        for size in range(min(_LONGEST_NGRAM, len(text) - 1), 0, -1):
            # The windows of text[:-1]: every earlier n-gram, overlapping ones too.
            earlier = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            found = np.flatnonzero((earlier == text[-size:]).all(axis=1))
            if found.size:
                copied = text[found[-1] + size :]
                return np.resize(copied, count).tolist()
        return []
