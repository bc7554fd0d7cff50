"""A Hugging Face target in the job: whole documents, spread over the context-parallel ranks.

Each rank runs the documents that it owns, by the code that prepares a feature store, so that a run
sees the numbers that a store would have held. Tensor-parallel ranks all have the target and run the
same documents.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, check_target_layer_ids
from megatron_splitkv.data.rope import longest_document
from megatron_splitkv.data.shard import FEATURE_DTYPES
from megatron_splitkv.data.target_states import (
    check_chunks,
    check_final_hidden,
    decoder_layers,
    document_states,
)
from megatron_splitkv.online.source import document_owners, documents_source
from megatron_splitkv.plan.row_source import RowSource

BATCH_TOKENS = 4096


def check_lengths(config: Any, longest: int, batch_tokens: int = BATCH_TOKENS) -> None:
    """Refuse a target whose RoPE does not let it read documents as a pass takes them.

    Args:
        config: transformers' configuration of the target.
        longest: tokens of the longest document that will come.
        batch_tokens: padded tokens of one forward pass.

    Raises:
        ConfigError: naming limit and remedy.
    """
    most = longest_document(config, batch_tokens)
    if most is not None and longest > most:
        raise ConfigError(
            f"the target's RoPE (longrope) does not let it read a document of more than {most} "
            f"tokens in chunks, and the longest has {longest}; train from a feature store prepared "
            f"with --batch-tokens {longest}, or cut with `splitkv prepare --sequence-length {most}`"
        )


class HFTarget:
    """An `OnlineTarget` that needs nobody: no rank of it talks to another.

    The rows of a document lie on one rank until the exchange, so a pack of one long document costs
    that rank its features whole.

    Args:
        model: from `load_target`, on the device of training.
        meta: the tapped layers, and the dtype of what is handed out, as a store would have it.
        cp_size: P.
        final_hidden: hand out what the target's head reads, too.
        longest: tokens of the longest document that will come, to be refused now and not then.
        batch_tokens: padded tokens of one forward pass, see `document_states`.

    Raises:
        ConfigError: no such layers, `final_hidden` of a target whose logits are more than its head
            of them, or documents longer than a pass of one that cannot read them in chunks, or
            whose RoPE forbids it.
    """

    def __init__(
        self,
        model: Any,
        meta: StoreMeta,
        *,
        cp_size: int,
        final_hidden: bool,
        longest: int = 0,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        check_lengths(model.config, longest, batch_tokens)
        layers = decoder_layers(model)
        check_target_layer_ids(meta.target_layer_ids, len(layers))
        if final_hidden:
            check_final_hidden(model)
        if longest > batch_tokens:
            _check_long(model, longest, batch_tokens)
        self.model = model
        self.meta = meta
        self.cp_size = cp_size
        self.final_hidden = final_hidden
        self.batch_tokens = batch_tokens
        weights = sum(parameter.numel() for parameter in layers[0].parameters())
        # A row costs 2 * weights FLOPs in the linears, and 2 * d * n on average in causal attention
        # over n rows.
        self._linear_length = weights // meta.target.hidden_size

    def source(self, cu_seqlens: NDArray[np.int64]) -> RowSource:
        """See `OnlineTarget.source`: documents whole, in the pack's order on each rank."""
        return documents_source(cu_seqlens, self._owners(cu_seqlens), self.cp_size)

    def states(
        self, token_ids: NDArray[np.int64], cu_seqlens: NDArray[np.int64], cp_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `OnlineTarget.states`."""
        mine = np.flatnonzero(self._owners(cu_seqlens) == cp_rank)
        lengths = np.diff(cu_seqlens)[mine]
        first_row = (np.cumsum(lengths) - lengths).tolist()
        tokens = torch.from_numpy(token_ids)
        documents = [tokens[cu_seqlens[i] : cu_seqlens[i + 1]] for i in mine]
        features = self._rows(int(lengths.sum()), self.meta.feature_width)
        final_hidden = None
        if self.final_hidden:
            final_hidden = self._rows(len(features), self.meta.target.hidden_size)
        for piece in document_states(
            self.model,
            documents,
            self.meta.target_layer_ids,
            batch_tokens=self.batch_tokens,
            output_device=features.device,
        ):
            start = first_row[piece.document] + piece.start
            rows = slice(start, start + len(piece.features))
            features[rows] = piece.features
            if final_hidden is not None:
                final_hidden[rows] = piece.final_hidden
        return features, final_hidden

    def _owners(self, cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
        return document_owners(cu_seqlens, self.cp_size, self._linear_length)

    def _rows(self, num_rows: int, width: int) -> torch.Tensor:
        dtype = FEATURE_DTYPES[self.meta.dtype]
        return torch.empty(num_rows, width, dtype=dtype, device=self.model.device)


def _check_long(model: Any, longest: int, batch_tokens: int) -> None:
    try:
        check_chunks(model, longest, batch_tokens)
    except ConfigError as error:
        raise ConfigError(
            f"{type(model).__name__} cannot read a document in chunks, and the longest has "
            f"{longest} tokens, more than one pass of {batch_tokens}; train from a feature store, "
            f"or cut with `splitkv prepare --sequence-length {batch_tokens}`"
        ) from error
