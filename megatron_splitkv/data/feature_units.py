"""The features side of preparation: shards of both stores as work units."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import INDEX_FILE
from megatron_splitkv.data.store_writer import StoreBuilder
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.target_states import (
    StatePiece,
    check_final_hidden,
    document_states,
)


class StateSource(Protocol):
    """Where hidden states come from."""

    def read(
        self,
        store: str,
        documents: range,
        token_ids: Sequence[torch.Tensor],
        progress: Progress,
    ) -> Iterator[StatePiece]:
        """Hidden states of consecutive documents of a store, in pieces of any order.

        Args:
            store: `train` or `valid`.
            documents: their numbers in the store; a piece's `document` counts from the first.
            token_ids: ``[n]`` each.
            progress: told the tokens done.
        """


class TargetStates:
    """The target reads the documents.

    Args:
        model: from `load_target`; asked for when there is work.
        meta: of the stores.
        batch_tokens: padded tokens of one forward pass.
    """

    def __init__(self, model: Callable[[], Any], meta: StoreMeta, batch_tokens: int) -> None:
        self._model = model
        self._meta = meta
        self._batch_tokens = batch_tokens

    def read(
        self,
        store: str,
        documents: range,
        token_ids: Sequence[torch.Tensor],
        progress: Progress,
    ) -> Iterator[StatePiece]:
        """See `StateSource`.

        Raises:
            ConfigError: a document that the target cannot read, or final hidden states that do not
                say what it says.
        """
        model = self._model()
        if self._meta.final_hidden:
            check_final_hidden(model)
        return document_states(
            model,
            token_ids,
            self._meta.target_layer_ids,
            batch_tokens=self._batch_tokens,
            progress=progress,
        )


class FeatureUnits:
    """The shards of the stores that a target's features go into, numbered through.

    Args:
        folder: where the stores are made.
        samples: the token stores that hold their documents, by name.
        meta: of the stores.
        max_shard_bytes: of the stores.
        states: gives the hidden states.

    Attributes:
        sizes: tokens of each unit.
    """

    def __init__(
        self,
        folder: Path,
        samples: dict[str, FeatureStore],
        meta: StoreMeta,
        max_shard_bytes: int,
        states: StateSource,
    ) -> None:
        # A kill may have come after one of the stores was closed.
        self._builders = {
            name: StoreBuilder(folder / name, meta, store.lengths, max_shard_bytes)
            for name, store in samples.items()
            if not (folder / name / INDEX_FILE).exists()
        }
        self._samples = samples
        self._meta = meta
        self._states = states
        self._units = [
            (store, shard)
            for store, builder in self._builders.items()
            for shard in range(builder.num_shards)
        ]
        self.sizes: list[int] = [
            int(rows)
            for builder in self._builders.values()
            for rows in np.add.reduceat(builder.lengths, builder.bounds[:-1])
        ]

    def finished(self, unit: int) -> bool:
        """Whether a unit's shard is there."""
        store, shard = self._units[unit]
        return self._builders[store].finished(shard)

    def write(self, unit: int, progress: Progress) -> None:
        """Write one shard.

        Args:
            unit: its number.
            progress: told the tokens done.

        Raises:
            ConfigError: a full disk, states that cannot be had, or another process has finished the
                shard in the meantime.
        """
        store, shard = self._units[unit]
        builder = self._builders[store]
        documents = range(*builder.bounds[shard : shard + 2].tolist())
        ids, masks = zip(*self._documents(self._samples[store], documents), strict=True)
        with builder.open_shard(shard, ids, masks) as writer:
            for piece in self._states.read(store, documents, ids, progress):
                if builder.finished(shard):
                    raise ConfigError(f"another process wrote shard {shard} of {builder.path}")
                final = piece.final_hidden if self._meta.final_hidden else None
                writer.write_rows(piece.document, piece.start, piece.features, final)

    def close(self, frozen: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Make the folders stores, once all units are finished.

        Args:
            frozen: gives the target's embedding and head, which the training store holds.
        """
        if "train" in self._builders:
            self._builders["train"].write_frozen(*frozen())
        for builder in self._builders.values():
            builder.close()

    @staticmethod
    def _documents(
        samples: FeatureStore, documents: range
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for document in documents:
            ids, mask = samples.token_ids(document), samples.loss_mask(document)
            yield torch.from_numpy(ids), torch.from_numpy(mask)
