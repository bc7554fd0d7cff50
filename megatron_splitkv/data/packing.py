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
from megatron_splitkv.data.pack_fit import fit_packs
from megatron_splitkv.data.store import FeatureStore


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
    """Documents packed to a token and an anchor budget, every document exactly once in each epoch.

    Each epoch shuffles the documents by (seed, epoch), fits them into packs window by window (see
    `pack_fit`), and shuffles the packs. Epochs may differ in their number of packs; item indices
    run through them without end. This order is the canonical one: no parallel size and no batch
    size changes it.

    Args:
        lengths: tokens of each document.
        seq_length: token budget of a pack.
        seed: seed of the shuffles.
        num_anchors: that are drawn in a document at most; None, at every position with a next one.
        max_anchors: anchor budget of a pack; None for none. A document that has more by itself gets
            a pack without any other document with anchors.

    Shape:
        lengths: int64 ``[num_documents]``.

    Raises:
        ConfigError: no document, one that is longer than the token budget, or an anchor budget
            below 1.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        seq_length: int,
        seed: int,
        *,
        num_anchors: int | None = None,
        max_anchors: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seq_length = seq_length
        self.seed = seed
        self.num_anchors = num_anchors
        self.max_anchors = max_anchors
        if self.lengths.size == 0:
            raise ConfigError("the feature store holds no document: nothing to pack")
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > seq_length:
            raise ConfigError(
                f"document {longest} has {self.lengths[longest]} tokens, more than --seq-length "
                f"{seq_length}; raise --seq-length, or prepare the store with a smaller "
                "--sequence-length"
            )
        if max_anchors is not None and max_anchors < 1:
            raise ConfigError(
                f"--max-anchors-per-pack {max_anchors} is too small; it must be at least 1"
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
        documents, bounds = self._epoch(epoch)
        pack = item_index - self._first_item[epoch]
        return documents[bounds[pack] : bounds[pack + 1]]

    def num_packs(self, epoch: int) -> int:
        """Items of one epoch."""
        return self._epoch(epoch)[1].size - 1

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_epoch"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._pack_epoch)

    def _pack_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """All documents, pack by pack, and the bounds of the packs."""
        # Raw words of a bit generator are the same in every numpy; shuffles of a Generator are not.
        words = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        order = np.argsort(words.random_raw(self.lengths.size), kind="stable")
        lengths = self.lengths[order]
        pack_of = fit_packs(lengths, self._anchors(lengths), self.seq_length, self.max_anchors or 1)
        packs = int(pack_of.max()) + 1
        place = np.empty(packs, dtype=np.int64)
        place[np.argsort(words.random_raw(packs), kind="stable")] = np.arange(packs)
        pack_of = place[pack_of]
        # Stable: inside a pack the shuffle's order stays, which prefers no length.
        by_pack = np.argsort(pack_of, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))])
        return order[by_pack], bounds

    def _anchors(self, lengths: np.ndarray) -> np.ndarray:
        """What each document takes of the anchor budget."""
        if self.max_anchors is None:
            return np.zeros_like(lengths)
        most = self.max_anchors if self.num_anchors is None else self.num_anchors
        return np.clip(lengths - 1, 0, min(most, self.max_anchors))


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
        token_ids=store.gather_token_ids(ids),
        loss_mask=store.gather_loss_masks(ids),
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

    return _reader(pack, store.gather_features)


def final_hidden_reader(store: FeatureStore, pack: Pack) -> Callable[[np.ndarray], torch.Tensor]:
    """The same for the target's final hidden states, ``[rows, d]``.

    Raises:
        ConfigError: the store was written without them.
    """
    store.require_final_hidden()
    return _reader(pack, store.gather_final_hidden)


def _reader(
    pack: Pack, gather: Callable[[np.ndarray, np.ndarray, np.ndarray], torch.Tensor]
) -> Callable[[np.ndarray], torch.Tensor]:
    bounds = pack.cu_seqlens

    def read(row_ranges: np.ndarray) -> torch.Tensor:
        starts, stops = np.asarray(row_ranges, dtype=np.int64).reshape(-1, 2).T
        bad = (starts < 0) | (starts > stops) | (stops > bounds[-1])
        if bad.any():
            i = int(bad.argmax())
            raise IndexError(f"rows {starts[i]}..{stops[i]} of a pack with {bounds[-1]}")
        # A range that spans documents becomes a part in each of them. Methods of arrays: numpy's
        # functions of the same names take several times as long for a few numbers.
        first = bounds.searchsorted(starts, "right") - 1
        counts = bounds.searchsorted(stops) - first
        slots = np.arange(counts.sum()) + (first + counts - counts.cumsum()).repeat(counts)
        origins = bounds[slots]
        begins = np.maximum(starts.repeat(counts) - origins, 0)
        ends = np.minimum(stops.repeat(counts), bounds[slots + 1]) - origins
        return gather(pack.document_ids[slots], begins, ends)

    return read
