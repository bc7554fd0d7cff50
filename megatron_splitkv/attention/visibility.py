"""What Megatron says about who sees what, as a plan of rows: masks, packed sequences, layouts.

A plan is made once and kept: all layers of a micro-batch find it again by the shapes of their
inputs and by the very tensors that say more, cu_seqlens or a padding mask. Those are read when the
plan is made, which waits for the GPU if they are there: once a micro-batch, not once a layer.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from numpy.typing import NDArray

from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import RowPlan, even_positions, zigzag_positions

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_CAUSAL_WITHOUT_MASK = (AttnMaskType.causal, AttnMaskType.causal_bottom_right)

# Micro-batches in flight between a first forward and the last recompute of a pipeline stage, about.
_KEPT_PLANS = 8


def row_plan_of(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    mask_type: AttnMaskType,
    packed_seq_params: PackedSeqParams | None,
    cp_group: dist.ProcessGroup | None,
) -> RowPlan:
    """The plan of a core attention that was given none.

    * ``causal`` without packing: each sample in Megatron's zigzag order over the ranks.
    * other mask types without packing: every query of a sample sees all its keys, on whatever rank
      they are; a key padding mask hides those that are padding (``padding_causal``: both).
    * packed (`qkv_format` ``thd``): documents by cu_seqlens, each in zigzag order over the ranks;
      rows between a document's end and its padded end see nothing and are not seen.

    Args:
        query: this rank's query rows.
        key: this rank's keys, as many as other ranks hold.
        attention_mask: None, or a key padding mask of this rank's keys, True where hidden. Where
            it hides keys amid a sample's, those that are left are copied.
        mask_type: of the layer.
        packed_seq_params: of the micro-batch.
        cp_group: the context-parallel group; None for one process.

    Shape:
        query ``[sq, b, np, hn]`` and key ``[sk, b, ng, hn]``, or ``[t, heads, hn]`` when packed;
        attention_mask bool ``[b, 1, 1, sk]``.

    Raises:
        ConfigError: visibility that is no range of keys for every row.
    """
    packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
    if query.ndim != key.ndim or query.ndim != (3 if packed else 4):
        raise ConfigError(
            f"query is {tuple(query.shape)} and key {tuple(key.shape)}; splitkv takes [rows, "
            "samples, heads, width], or [rows, heads, width] with qkv_format thd"
        )
    if packed_seq_params is not None and packed:
        if attention_mask is not None:
            raise ConfigError(
                "splitkv takes no attention mask for packed sequences: cu_seqlens say who sees what"
            )
        if mask_type is AttnMaskType.arbitrary:
            raise ConfigError(
                "splitkv does not take attention mask type arbitrary for packed sequences; use "
                "padding_causal or padding"
            )
        return _packed(query, key, mask_type in _CAUSAL, packed_seq_params, cp_group)
    if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
        raise ConfigError(
            f"cu_seqlens are given with qkv_format {packed_seq_params.qkv_format!r}, which says "
            "that rows are not packed; use 'thd', or give no cu_seqlens"
        )
    if attention_mask is not None:
        _check_padding_mask(attention_mask, mask_type, query.shape[1], key.shape[0])
    if mask_type in _CAUSAL and query.shape[0] != key.shape[0]:
        raise ConfigError(
            f"causal splitkv attention has {query.shape[0]} query rows and {key.shape[0]} keys a "
            "rank; they must be the same rows (a key cache of inference is not supported)"
        )
    return _unpacked(query, key, mask_type in _CAUSAL, attention_mask, cp_group)


def _unpacked(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    padding_mask: torch.Tensor | None,
    cp_group: dist.ProcessGroup | None,
) -> RowPlan:
    """Samples of equal length, one after the other."""
    (rows, batch), keys = query.shape[:2], key.shape[0]
    size, rank = group_size(cp_group), group_rank(cp_group)
    samples = np.arange(batch + 1)

    def build() -> RowPlan:
        if causal:
            bounds = samples * rows * size
            return RowPlan.of_causal(zigzag_positions(bounds, size), bounds)
        return RowPlan.of_documents(
            even_positions(batch, rows, size),
            even_positions(batch, keys, size),
            samples * rows * size,
            samples * keys * size,
        )

    shape = ("unpacked", causal, rows, keys, batch, size)
    plan = _kept(shape, (), build)
    if padding_mask is None:
        return plan
    return _kept(
        (*shape, rank),
        (padding_mask,),
        lambda: plan.with_hidden(rank, padding_mask.cpu().expand(batch, 1, 1, keys).flatten()),
    )


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    params: PackedSeqParams,
    cp_group: dist.ProcessGroup | None,
) -> RowPlan:
    """Documents of any length, one after the other."""
    if params.local_cp_size is not None or params.cp_group is not None:
        raise ConfigError("splitkv does not support hybrid context parallelism (local_cp_size)")
    if params.cu_seqlens_q is None or params.cu_seqlens_kv is None:
        raise ConfigError("packed sequences (qkv_format thd) need cu_seqlens_q and cu_seqlens_kv")
    size = group_size(cp_group)
    real = (params.cu_seqlens_q, params.cu_seqlens_kv)
    padded = (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
    bounds = tuple(r if p is None else p for r, p in zip(real, padded, strict=True))
    rows = (query.shape[0], key.shape[0])

    def build() -> RowPlan:
        *ends, q, kv = _read((*real, *bounds))
        lengths = [np.diff(x) for x in ends]
        for name, held, end in zip(("query", "key"), rows, (q[-1], kv[-1]), strict=True):
            if held * size != end:
                raise ConfigError(
                    f"cu_seqlens end at {end}, but {size} ranks with {held} {name} rows each hold "
                    f"{held * size}; the rows must be those of the documents, padding included"
                )
        if not causal:
            return RowPlan.of_documents(
                zigzag_positions(q, size),
                zigzag_positions(kv, size),
                q,
                kv,
                lengths_q=lengths[0],
                lengths_kv=lengths[1],
            )
        if not (np.array_equal(q, kv) and np.array_equal(lengths[0], lengths[1])):
            raise ConfigError(
                "causal splitkv attention of packed sequences needs equal cu_seqlens for queries "
                "and keys; use mask type padding where every query sees its whole document"
            )
        return RowPlan.of_causal(zigzag_positions(q, size), q, lengths=lengths[0])

    return _kept(("packed", causal, *rows, size), (*real, *bounds), build)


def _check_padding_mask(mask: torch.Tensor, mask_type: AttnMaskType, batch: int, keys: int) -> None:
    if mask_type in _CAUSAL_WITHOUT_MASK:
        raise ConfigError(
            f"splitkv takes no attention mask of shape {tuple(mask.shape)} with mask type "
            f"{mask_type.name}, which says all; pass None "
            "(--no-create-attention-mask-in-dataloader)"
        )
    if mask.dtype != torch.bool or mask.shape not in ((batch, 1, 1, keys), (1, 1, 1, keys)):
        raise ConfigError(
            f"splitkv takes no attention mask of shape {tuple(mask.shape)} and {mask.dtype}: only "
            f"a key padding mask, bool of shape {(batch, 1, 1, keys)}, True where a key of this "
            "rank is hidden; other visibility by ranges of keys can be given as a RowPlan "
            "(SplitKVPackedSeqParams(plan=...))"
        )


# Reading and keeping

_PLANS: OrderedDict[Hashable, tuple[Sequence[torch.Tensor], RowPlan]] = OrderedDict()


def _kept(key: Hashable, tensors: Sequence[torch.Tensor], build: Callable[[], RowPlan]) -> RowPlan:
    """The plan of these very tensors, built if it is not among the last ones.

    On the host a tensor is known by its content. Elsewhere by its memory and its version, which
    every write through torch changes: reading it would wait for the device in every layer;
    recompute, which detaches tensors, finds the plan again. The tensors are kept along with the
    plan, so nothing else can come to lie in their memory.
    """
    if any(x.is_inference() and not x.is_cpu for x in tensors):  # they have no version
        return build()
    full_key = (key, *(_identity(x) for x in tensors))
    if full_key in _PLANS:
        _PLANS.move_to_end(full_key)
    else:
        _PLANS[full_key] = (tensors, build())
        if len(_PLANS) > _KEPT_PLANS:
            _PLANS.popitem(last=False)
    return _PLANS[full_key][1]


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    if x.is_cpu:
        return (x.detach().numpy().tobytes(), x.dtype, x.shape)
    return (x.data_ptr(), x._version, x.dtype, x.device, x.shape, x.stride())


def _read(vectors: Sequence[torch.Tensor]) -> list[NDArray[np.int64]]:
    """All vectors on the host, by one copy; Megatron's data loader gives them a batch dimension."""
    flat = torch.cat([x.detach().flatten().to(torch.int64) for x in vectors]).cpu().numpy()
    return np.split(flat, np.cumsum([x.numel() for x in vectors])[:-1])
