"""A Megatron GPT as the target in the job: split over tensor- and context-parallel ranks.

Documents of a pack are spread over the context-parallel ranks as Megatron does it, each cut into
2 P chunks, r and 2 P - 1 - r for rank r. Where a document's length is no multiple of 2 P, rows are
appended: in a causal model they change no real row, so they need no mask, and the exchange drops
them.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import nn

from megatron_splitkv.comm import group_size
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import check_target_layer_ids
from megatron_splitkv.online.gpt_from_hf import build_gpt_from_hf
from megatron_splitkv.plan import RowSource


def build_megatron_target(
    folder: str | os.PathLike[str],
    target_layer_ids: Sequence[int],
    *,
    pg_collection: ProcessGroupCollection,
    backend: str = "local",
    final_hidden: bool = False,
    feature_dtype: torch.dtype | None = None,
) -> "MegatronTarget":
    """Make an `OnlineTarget` of a Hugging Face folder.

    Args:
        folder: a dense llama, qwen2 or qwen3; what else is refused says
            `gpt_from_hf.check_gpt_from_hf`, which needs no process groups.
        target_layer_ids: 0-based layer outputs that become features.
        pg_collection: process groups; tp and cp split the target.
        backend: whose modules: ``local`` or ``transformer_engine``.
        final_hidden: hand out what the target's head reads, too.
        feature_dtype: of what is handed out; the weights' when None.

    Raises:
        ConfigError: the target cannot be built, or has no such layers.
    """
    model = build_gpt_from_hf(folder, pg_collection=pg_collection, backend=backend)
    return MegatronTarget(
        model,
        target_layer_ids,
        pg_collection.cp,
        final_hidden=final_hidden,
        feature_dtype=feature_dtype,
    )


class MegatronTarget:
    """An `OnlineTarget` of Megatron's `GPTModel`: one from `build_gpt_from_hf`, or your own.

    Tensor-parallel ranks hold the same rows. The head never runs. Every rank of the tensor- and
    context-parallel groups has to call `states`, which communicates inside attention and linears.

    Args:
        model: with all layers in this process's pipeline stage and rotary positions; its attention
            must take packed documents: Transformer Engine's does, and `SplitKVCoreAttention`. It
            is put into eval mode and frozen.
        target_layer_ids: 0-based layer outputs that become features.
        cp_group: the context-parallel group; None for one process.
        final_hidden: hand out the output of the final norm, too.
        feature_dtype: of what is handed out; the weights' when None.

    Raises:
        ConfigError: the model has no such layers, or is one that this cannot drive.
    """

    def __init__(
        self,
        model: GPTModel,
        target_layer_ids: Sequence[int],
        cp_group: dist.ProcessGroup | None,
        *,
        final_hidden: bool = False,
        feature_dtype: torch.dtype | None = None,
    ) -> None:
        self.cp_size = group_size(cp_group)
        _check(model, self.cp_size, final_hidden=final_hidden)
        check_target_layer_ids(target_layer_ids, len(model.decoder.layers))
        self.model = model.eval().requires_grad_(False)
        self.target_layer_ids = tuple(target_layer_ids)
        self.final_hidden = final_hidden
        weight = model.embedding.word_embeddings.weight
        self.feature_dtype = weight.dtype if feature_dtype is None else feature_dtype
        self.device = weight.device

    def source(self, cu_seqlens: NDArray[np.int64]) -> RowSource:
        """See `OnlineTarget.source`: chunks r and 2 P - 1 - r of every document, with padding."""
        return RowSource.zigzag_documents(
            self._padded(cu_seqlens), self.cp_size, lengths=np.diff(cu_seqlens)
        )

    @torch.no_grad()
    def states(
        self, token_ids: NDArray[np.int64], cu_seqlens: NDArray[np.int64], cp_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `OnlineTarget.states`."""
        rows = self.source(cu_seqlens).rows(cp_rank)  # negative where padding is
        tokens = torch.from_numpy(np.where(rows < 0, 0, token_ids[np.maximum(rows, 0)]))
        bounds = self._padded(cu_seqlens)
        offsets = torch.from_numpy(bounds.astype(np.int32)).to(self.device, non_blocking=True)
        model, longest = self.model, int(np.diff(bounds).max())
        with self._tapped(rows.size) as features, _without_advice():
            hidden = model.decoder(
                hidden_states=model.embedding(
                    input_ids=tokens.to(self.device, non_blocking=True)[None],
                    position_ids=None,  # rotary positions follow from the offsets
                ),
                attention_mask=None,
                # Not through `forward`, which would keep a table for every length that it meets.
                rotary_pos_emb=model.rotary_pos_emb.get_emb(longest),
                packed_seq_params=PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=offsets,
                    cu_seqlens_kv=offsets,
                    max_seqlen_q=longest,
                    max_seqlen_kv=longest,
                ),
            )  # [rows, 1, d]
        final_hidden = hidden.squeeze(1).to(self.feature_dtype) if self.final_hidden else None
        return features.flatten(1), final_hidden

    def _padded(self, cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bounds of the documents with the rows that make them multiples of 2 P."""
        multiple = 2 * self.cp_size if self.cp_size > 1 else 1
        lengths = -(-np.diff(cu_seqlens) // multiple) * multiple
        return np.append(0, np.cumsum(lengths))

    @contextmanager
    def _tapped(self, num_rows: int) -> Iterator[torch.Tensor]:
        """Features ``[rows, C, d]`` that fill as the layers run; no other output is kept."""
        config, width = self.model.config, len(self.target_layer_ids)
        features = torch.empty(
            num_rows, width, config.hidden_size, dtype=self.feature_dtype, device=self.device
        )
        layers = self.model.decoder.layers
        handles = [
            layers[layer_id].register_forward_hook(partial(_keep, features[:, i]))
            for i, layer_id in enumerate(self.target_layer_ids)
        ]
        try:
            yield features
        finally:
            for handle in handles:
                handle.remove()


def _keep(rows: torch.Tensor, layer: nn.Module, inputs: Any, output: Any) -> None:
    """Copy what a layer returns, ``[rows, 1, d]`` and a context of encoders, which is None."""
    hidden = output[0] if isinstance(output, tuple) else output
    rows.copy_(hidden.squeeze(1))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without the advice about `--cp-comm-type`, which is the drafter's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="splitkv moves queries")
        yield


def _check(model: GPTModel, cp_size: int, *, final_hidden: bool) -> None:
    config = model.config
    for name, value, allowed in (
        ("pipeline_model_parallel_size", config.pipeline_model_parallel_size, 1),
        ("context_parallel_size", config.context_parallel_size, cp_size),
        ("sequence_parallel", config.sequence_parallel, False),
        ("position_embedding_type", model.position_embedding_type, "rope"),
    ):
        if value != allowed:
            raise ConfigError(
                f"an online target's {name} is {value!r}, it must be {allowed!r} here; build its "
                "GPTModel so"
            )
    if final_hidden and model.decoder.final_layernorm is None:
        raise ConfigError(
            "an online target without a final norm has no final hidden states; build its GPTModel "
            "with post_process=True"
        )
