"""Which documents make which micro-batch: a pure function of (seed, item index).

One item of the dataset is one packed micro-batch of several documents. Nothing is remembered
between items, so a resumed run, or a loader worker that starts in the middle, builds the packs
that the uninterrupted run would.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.data.store import FeatureStore

# First fit looks for room among this many documents' packs: enough that packs fill well.
_WINDOW = 1024


@dataclass(frozen=True)
class Pack:
    """Documents of one micro-batch, laid end to end.

    Shape:
        document_ids: int64 ``[D]``. cu_seqlens: int64 ``[D + 1]``, offsets of the documents.
        token_ids: int64 ``[S]``. loss_mask: bool ``[S]``.
    """

    document_ids: np.ndarray
    cu_seqlens: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray


class PackedEpochs:
    """Documents packed to a token budget, every document exactly once in each epoch.

    Each epoch shuffles the documents by (seed, epoch), packs them first-fit in that order, window
    by window, and shuffles the packs. (First-fit-decreasing would fill a little better, but gives
    packs of equally long documents: some steps would see a few long ones, others dozens of short
    ones with as many times the anchors.) Epochs may differ in their number of packs; item indices
    run through them without end.

    Args:
        lengths: int64 ``[num_documents]``, tokens of each document.
        seq_length: token budget of a pack.
        seed: seed of the shuffles.

    Raises:
        ConfigError: no document, or one that is longer than the budget.
    """

    def __init__(self, lengths: np.ndarray, seq_length: int, seed: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seq_length = seq_length
        self.seed = seed
        if self.lengths.size == 0:
            raise ConfigError("the feature store holds no document: nothing to pack")
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > seq_length:
            raise ConfigError(
                f"document {longest} has {self.lengths[longest]} tokens, more than --seq-length "
                f"{seq_length}; raise --seq-length, or prepare the store with a smaller "
                "--sequence-length"
            )
        # Only a memo: the packs of an epoch depend on (seed, epoch) alone.
        self._epoch = lru_cache(maxsize=2)(self._pack_epoch)
        self._first_item = [0]

    def pack_documents(self, item_index: int) -> np.ndarray:
        """Document ids of one item, int64 ``[D]``, in the pack's order."""
        while self._first_item[-1] <= item_index:
            epoch = len(self._first_item) - 1
            self._first_item.append(self._first_item[-1] + self.num_packs(epoch))
        epoch = bisect_right(self._first_item, item_index) - 1
        return self._epoch(epoch)[item_index - self._first_item[epoch]]

    def num_packs(self, epoch: int) -> int:
        """Items of one epoch."""
        return len(self._epoch(epoch))

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_epoch"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._pack_epoch)

    def _pack_epoch(self, epoch: int) -> list[np.ndarray]:
        # Raw words of a bit generator are the same in every numpy; shuffles of a Generator are not.
        words = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        order = np.argsort(words.random_raw(self.lengths.size), kind="stable")
        packs: list[np.ndarray] = []
        for start in range(0, order.size, _WINDOW):
            packs += self._pack_window(order[start : start + _WINDOW], words)
        return [packs[i] for i in np.argsort(words.random_raw(len(packs)), kind="stable")]

    def _pack_window(self, documents: np.ndarray, words: np.random.Philox) -> list[np.ndarray]:
        room = np.full(documents.size, self.seq_length, dtype=np.int64)
        pack_of = np.empty(documents.size, dtype=np.int64)
        for i, length in enumerate(self.lengths[documents]):
            pack_of[i] = np.argmax(room >= length)
            room[pack_of[i]] -= length
        # Documents that fill a gap are short and come late; no place in a pack shall prefer them.
        by_pack = np.lexsort((words.random_raw(documents.size), pack_of))
        bounds = np.flatnonzero(np.diff(pack_of[by_pack])) + 1
        return np.split(documents[by_pack], bounds)


def read_pack(store: FeatureStore, document_ids: np.ndarray) -> Pack:
    """Token ids and loss masks of the documents of one pack (no features).

    Args:
        store: where the documents lie.
        document_ids: from `PackedEpochs.pack_documents`.
    """
    ids = np.asarray(document_ids, dtype=np.int64)
    return Pack(
        document_ids=ids,
        cu_seqlens=np.concatenate([[0], np.cumsum(store.lengths[ids])]).astype(np.int64),
        token_ids=np.concatenate([store.token_ids(int(document)) for document in ids]),
        loss_mask=np.concatenate([store.loss_mask(int(document)) for document in ids]),
    )


def draw_blocks(
    pack: Pack, *, num_anchors: int, block_size: int, seed: int, item_index: int
) -> BlockLayout:
    """The draft blocks on which training sees a pack, without padding.

    Args:
        pack: of `read_pack`.
        num_anchors: blocks per document.
        block_size: B.
        seed: the run's.
        item_index: the item that the pack is.
    """
    layout = select_anchors(
        pack.loss_mask,
        pack.cu_seqlens,
        # No document has more candidates than tokens.
        num_anchors=min(num_anchors, int(np.diff(pack.cu_seqlens).max())),
        block_size=block_size,
        seed=seed,
        step=item_index,
        sample_ids=pack.document_ids,
    )
    return layout.without_padding()


def feature_reader(store: FeatureStore, pack: Pack) -> Callable[[np.ndarray], torch.Tensor]:
    """A closure that reads features of a pack by ranges of packed positions.

    Args:
        store: where the documents lie.
        pack: the pack that gives positions their meaning.

    Returns:
        ``read_features(row_ranges)``: row_ranges int64 ``[k, 2]`` global packed positions,
        half-open, ascending -> ``[rows, C * d]`` in the store's dtype. Only those rows are read.
    """

    return _reader(store, pack, store.meta.feature_width, store.read_features_into)


def final_hidden_reader(store: FeatureStore, pack: Pack) -> Callable[[np.ndarray], torch.Tensor]:
    """The same for the target's final hidden states, ``[rows, d]``.

    Raises:
        ConfigError: the store was written without them.
    """
    store.require_final_hidden()
    return _reader(store, pack, store.meta.final_width, store.read_final_hidden_into)


def _reader(
    store: FeatureStore,
    pack: Pack,
    width: int,
    read_into: Callable[[int, int, int, torch.Tensor], None],
) -> Callable[[np.ndarray], torch.Tensor]:
    def read(row_ranges: np.ndarray) -> torch.Tensor:
        ranges = np.asarray(row_ranges, dtype=np.int64).reshape(-1, 2)
        rows = int((ranges[:, 1] - ranges[:, 0]).sum())
        out = torch.empty(rows, width, dtype=store.feature_dtype)
        done = 0
        for start, stop in ranges.tolist():
            if not 0 <= start <= stop <= pack.cu_seqlens[-1]:
                raise IndexError(f"rows {start}..{stop} of a pack with {pack.cu_seqlens[-1]}")
            while start < stop:
                slot = int(np.searchsorted(pack.cu_seqlens, start, side="right")) - 1
                origin = int(pack.cu_seqlens[slot])
                end = min(stop, int(pack.cu_seqlens[slot + 1]))
                read_into(
                    int(pack.document_ids[slot]),
                    start - origin,
                    end - origin,
                    out[done : done + end - start],
                )
                done += end - start
                start = end
        return out

    return read
