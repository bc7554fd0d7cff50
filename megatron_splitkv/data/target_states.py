"""What a target's layers say about documents: hooks on the tapped layers, batches, long prefills.

Only the tapped layers' outputs are kept, and the output head never runs. A document longer than a
batch is read in chunks that see the earlier ones through the target's own KV cache: activations
then depend on the chunk and not on the document. The cache does grow with the document, as in
decoding: 2 x layers x KV heads x head size x bytes of the dtype for each token.

Shape legend: n tokens of a piece, C tapped layers, d hidden size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from megatron_splitkv.compat.signatures import first_known_parameter
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chunk_attention import bounded_attention
from megatron_splitkv.data.meta import check_target_layer_ids
from megatron_splitkv.data.rope import check_document_length, rope_switches
from megatron_splitkv.data.target import Progress, import_transformers, silent

_SOFTCAP = "final_logit_softcapping"
_PROBE_TOKENS, _PROBE_PART = 24, 3
# Targets that passed `check_chunks`: online training asks in every step.
_GOES_ON: WeakSet[Any] = WeakSet()
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, eq=False)
class StatePiece:
    """Hidden states of consecutive tokens of one document.

    Args:
        document: index among the documents that were given.
        start: first token of the piece, in its document.
        features: outputs of the tapped layers, side by side.
        final_hidden: the decoder's output behind its final norm, which the head reads (see
            `check_final_hidden`).

    Shape:
        features ``[n, C * d]``, final_hidden ``[n, d]``, in the target's dtype. They are views of
        their batch's tensors.
    """

    document: int
    start: int
    features: torch.Tensor
    final_hidden: torch.Tensor


def decoder_layers(model: Any) -> nn.ModuleList:
    """The text decoder's layers, wherever the architecture nests them.

    Args:
        model: from `load_target`.

    Raises:
        ConfigError: no list of that many layers is found.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        # From the outside in: a layer's own lists (experts) come after the list of layers.
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ConfigError(
        f"{type(model).__name__} has no module list of {num_layers} decoder layers to tap"
    )


@contextmanager
def tapped_layers(
    model: Any, target_layer_ids: Sequence[int]
) -> Iterator[Callable[[], torch.Tensor]]:
    """Hook the tapped layers only, so that no other layer's output outlives its use.

    Args:
        model: from `load_target`.
        target_layer_ids: 0-based layer outputs.

    Yields:
        ``collect()``: features of the forward pass that ran last, ``[batch, length, C * d]``.
    """
    layers = decoder_layers(model)
    check_target_layer_ids(target_layer_ids, len(layers))
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer_id: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in target_layer_ids]

    def collect() -> torch.Tensor:
        return torch.cat([outputs.pop(i) for i in target_layer_ids], dim=-1)

    try:
        yield collect
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def document_states(
    model: Any,
    documents: Sequence[torch.Tensor],
    target_layer_ids: Sequence[int],
    *,
    batch_tokens: int = 4096,
    output_device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Iterator[StatePiece]:
    """Tapped and final hidden states of documents, whatever their lengths.

    Documents of up to `batch_tokens` are batched by similar length and padded on the right: in a
    causal model that changes no real row, so no mask is needed. Longer ones run alone, in chunks of
    `batch_tokens`. Where RoPE changes above some length (`rope_switches`), a batch lies on one side
    of it, and a document above it is never cut.

    Args:
        model: from `load_target`.
        documents: token ids, ``[n_i]`` each, none empty.
        target_layer_ids: 0-based layer outputs.
        batch_tokens: padded tokens of one forward pass.
        output_device: where the pieces lie.
        progress: told the tokens done.

    Yields:
        Pieces, longest documents first: one a document, or one a chunk in the order of the tokens.

    Raises:
        ConfigError: an empty document, or one longer than `batch_tokens` whose target cannot go on
            from chunk to chunk, or a target whose RoPE forbids it.
    """
    lengths = [int(document.numel()) for document in documents]
    if 0 in lengths:
        raise ConfigError(f"document {lengths.index(0)} is empty; leave it out")
    if batch_tokens < 1:
        raise ConfigError(f"{batch_tokens} tokens a forward pass; give at least 1")
    order = sorted(range(len(documents)), key=lambda i: (-lengths[i], i))
    num_long = sum(n > batch_tokens for n in lengths)
    switches = rope_switches(model.config)
    check_document_length(model.config, max(lengths, default=0), batch_tokens)
    if num_long:
        check_chunks(model, lengths[order[0]], batch_tokens)
    total, done = sum(lengths), 0
    with tapped_layers(model, target_layer_ids) as collect:
        for i in order[:num_long]:
            start = 0
            for features, final in _chunks(
                model, collect, documents[i], batch_tokens, output_device
            ):
                yield StatePiece(i, start, features[0], final[0])
                start += features.shape[1]
                progress(done + start, total)
            done += start
        at = num_long
        while at < len(order):
            longest = lengths[order[at]]
            side = bisect_left(switches, longest)
            batch = [
                i
                for i in order[at : at + batch_tokens // longest]
                if bisect_left(switches, lengths[i]) == side
            ]
            ids = nn.utils.rnn.pad_sequence([documents[i] for i in batch], batch_first=True)
            states = _read(model, collect, ids.to(model.device), output_device, use_cache=False)
            for i, features, final in zip(batch, *states, strict=True):
                yield StatePiece(i, 0, features[: lengths[i]], final[: lengths[i]])
                done += lengths[i]
            at += len(batch)
            progress(done, total)


def _chunks(
    model: Any,
    collect: Callable[[], torch.Tensor],
    document: torch.Tensor,
    size: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Features and final hidden states, ``[1, size, ...]`` each, of one chunk after the other."""
    cache = import_transformers().DynamicCache(config=model.config)
    options = {cache_keyword(model.get_decoder()): cache, "use_cache": True}
    with bounded_attention(model):
        for ids in document.to(model.device)[None].split(size, dim=1):
            # Nothing of a chunk is named here, to be held while the next one is read.
            yield _read(model, collect, ids, device, **options)


def _read(
    model: Any,
    collect: Callable[[], torch.Tensor],
    ids: torch.Tensor,
    device: torch.device | str,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and final hidden states of one forward pass: ``[batch, length, ...]``."""
    final = model.get_decoder()(input_ids=ids, **options)[0]
    return collect().to(device), final.to(device)


@torch.no_grad()
def check_chunks(model: Any, longest: int, batch_tokens: int) -> None:
    """Refuse long documents of a target that cannot go on from chunk to chunk.

    Some recurrent layers start anew whenever they read more than one token. A short probe, read
    whole and in small parts, shows it: the first token of each part then comes out of such a layer
    further off than it went in. (The median of these tokens: in 16 bits, another order of sums may
    send one to other experts.)

    Args:
        model: from `load_target`.
        longest: tokens of the longest document, for the message.
        batch_tokens: as given, for the message.

    Raises:
        ConfigError: naming the target's class and what to do.
    """
    if model in _GOES_ON:
        return
    num_layers = len(decoder_layers(model))
    probe = torch.arange(_PROBE_TOKENS) % model.get_input_embeddings().weight.shape[0]
    with tapped_layers(model, range(num_layers)) as collect:
        whole, parts = (
            torch.cat(
                [rows[0].float() for rows, _ in _chunks(model, collect, probe, size)]
            ).unflatten(1, (num_layers, -1))[_PROBE_PART::_PROBE_PART]
            for size in (_PROBE_TOKENS, _PROBE_PART)
        )
    errors = ((parts - whole).norm(dim=-1) / whole.norm(dim=-1)).median(dim=0).values
    exact = model.dtype in (torch.float32, torch.float64)
    if torch.diff(errors, prepend=errors.new_zeros(1)).max() > (5e-4 if exact else 0.02):
        raise ConfigError(
            f"{type(model).__name__} does not go on from one chunk of a document to the next; "
            f"read the longest, of {longest} tokens, at once: --batch-tokens {longest} "
            f"(was {batch_tokens}), or cut with --sequence-length"
        )
    _GOES_ON.add(model)


def cache_keyword(module: Any) -> str:
    """The keyword by which a model or decoder takes its cache: transformers 5 renames it.

    Raises:
        ConfigError: it takes none that is known.
    """
    return first_known_parameter(module.forward, _CACHE_NAMES, "transformers")


@torch.no_grad()
def check_final_hidden(model: Any) -> None:
    """Refuse a target whose logits are more than the head of its decoder's output.

    Some scale their logits: trained against the head of its final hidden states, a drafter would
    learn another distribution than the target's. Capped ones (``final_logit_softcapping``) are
    known to drafters.

    Args:
        model: from `load_target`.

    Raises:
        ConfigError: naming the target's class.
    """
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    bare = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False)[0])
    bare, cap = bare.float(), getattr(model.config.get_text_config(), _SOFTCAP, None)
    expected = bare if cap is None else cap * torch.tanh(bare / cap)
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise ConfigError(
            f"{type(model).__name__} changes its logits: its distribution is not that of its head "
            "applied to its final hidden states; prepare it without --final-hidden"
        )
