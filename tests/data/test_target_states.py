"""Taps are the layers' outputs; neither batches nor chunks change them; memory is bounded."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import chunk_attention, target_states
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.target_states import (
    decoder_layers,
    document_states,
    tapped_layers,
)
from tests.data.targets import random_documents, random_target

CHUNKABLE = ["llama", "gpt2", "mistral", "gemma2", "gemma3", "mamba2", "qwen3_5", "nested-gemma3"]


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return load_target(target_folder)


def _whole(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (piece,) = document_states(model, [ids], (0, 2), batch_tokens=len(ids))
    return piece.features, piece.final_hidden


def test_taps_are_zero_based_layer_outputs(model: Any) -> None:
    (ids,) = random_documents([20])
    with tapped_layers(model, (0, 1, 3)) as collect, torch.no_grad():
        hidden = model(ids[None], output_hidden_states=True).hidden_states
        features = collect()
    expected = torch.cat([hidden[i + 1] for i in (0, 1, 3)], dim=-1)
    assert torch.equal(features, expected)
    # The neighbouring convention (0 = embedding) is another tensor.
    wrong = torch.cat([hidden[i] for i in (0, 1, 3)], dim=-1)
    assert not torch.allclose(features, wrong, atol=0.1)


def test_hooks_are_gone_afterwards_even_after_an_error(model: Any) -> None:
    layer = decoder_layers(model)[1]
    before = len(layer._forward_hooks)  # Transformers may have its own.

    def fail() -> None:
        with tapped_layers(model, (1,)):
            assert len(layer._forward_hooks) == before + 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(layer._forward_hooks) == before


def test_tap_that_the_target_does_not_have_is_refused(model: Any) -> None:
    with (
        pytest.raises(ConfigError, match="layer 5 does not exist: the target has 5 layers"),
        tapped_layers(model, (1, 5)),
    ):
        pass


@pytest.mark.parametrize("kind", ["llama", "gpt2", "nested-llava"])
def test_layers_are_those_of_the_text_model(kind: str) -> None:
    target = random_target(kind)
    layers = decoder_layers(target)
    inner = {id(module) for module in target.get_decoder().modules()}
    assert len(layers) == 4
    assert id(layers) in inner


def test_features_of_a_padded_batch_are_those_of_each_document_alone(model: Any) -> None:
    documents = random_documents([9, 33, 1, 17, 33, 2])
    told: list[tuple[int, int]] = []
    pieces = document_states(
        model,
        documents,
        (1, 2),
        batch_tokens=66,
        progress=lambda done, total: told.append((done, total)),
    )
    batched = {piece.document: piece for piece in pieces}
    assert sorted(batched) == list(range(6))
    assert told[-1] == (95, 95)
    assert len(told) == 3
    for i, document in enumerate(documents):
        (alone,) = document_states(model, [document], (1, 2))
        assert batched[i].start == 0
        assert batched[i].features.shape == (len(document), 64)
        torch.testing.assert_close(batched[i].features, alone.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            batched[i].final_hidden, alone.final_hidden, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", CHUNKABLE)
def test_chunks_of_a_long_document_equal_the_whole(kind: str) -> None:
    target, documents = random_target(kind), random_documents([7, 50, 16, 33])
    told: list[tuple[int, int]] = []
    pieces = list(
        document_states(
            target,
            documents,
            (0, 2),
            batch_tokens=16,
            progress=lambda done, total: told.append((done, total)),
        )
    )
    assert [(p.document, p.start, len(p.features)) for p in pieces] == [
        *[(1, 0, 16), (1, 16, 16), (1, 32, 16), (1, 48, 2)],
        *[(3, 0, 16), (3, 16, 16), (3, 32, 1)],
        *[(2, 0, 16), (0, 0, 7)],
    ]
    assert told[-1] == (106, 106)
    assert [done for done, _ in told] == [16, 32, 48, 50, 66, 82, 83, 99, 106]
    for i, document in enumerate(documents):
        own = [p for p in pieces if p.document == i]
        features, final = _whole(target, document)
        scale = 1e-5 * float(features.abs().max())
        chunked = torch.cat([p.features for p in own])
        torch.testing.assert_close(chunked, features, rtol=1e-5, atol=scale)
        chunked = torch.cat([p.final_hidden for p in own])
        torch.testing.assert_close(chunked, final, rtol=1e-5, atol=1e-5 * float(final.abs().max()))


def test_rope_that_changes_with_the_length_is_each_document_s_own() -> None:
    target, documents = random_target("phi3"), random_documents([131, 66, 65, 64, 63, 7])
    # The first two passes would hold documents of both sides: 131 + 0, 66 + 65, then 64 + 63, ...
    pieces = list(document_states(target, documents, (0, 2), batch_tokens=200))
    assert [p.document for p in pieces] == [0, 1, 2, 3, 4, 5]
    for piece in pieces:
        with torch.no_grad():
            ids = documents[piece.document][None]
            hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([hidden[i + 1][0] for i in (0, 2)], dim=-1)
        torch.testing.assert_close(piece.features, expected, rtol=1e-5, atol=1e-5)


def test_chunks_that_rope_would_read_otherwise_are_refused() -> None:
    target, (document,) = random_target("phi3"), random_documents([131])
    chunks = [p.features for p in document_states(target, [document[:64]], (0, 2), batch_tokens=17)]
    assert [len(chunk) for chunk in chunks] == [17, 17, 17, 13]
    torch.testing.assert_close(
        torch.cat(chunks), _whole(target, document[:64])[0], rtol=1e-5, atol=1e-5
    )
    assert len(list(document_states(target, [document], (0, 2), batch_tokens=131))) == 1
    with pytest.raises(ConfigError, match="give --batch-tokens 131, or cut with --sequence-length"):
        next(document_states(target, [document], (0, 2), batch_tokens=17))


def test_the_target_s_own_attention_is_back_afterwards() -> None:
    target, (document,) = random_target("llama"), random_documents([40])
    pieces = document_states(target, [document], (0, 2), batch_tokens=16)
    next(pieces)
    assert target.config._attn_implementation != "sdpa"
    pieces.close()
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_starts_anew_in_every_chunk_is_refused(dtype: torch.dtype) -> None:
    target = random_target("jamba").to(dtype)
    documents = random_documents([16, 50, 20])
    message = (
        "JambaForCausalLM does not go on from one chunk of a document to the next; read the "
        "longest, of 50 tokens, at once: --batch-tokens 50"
    )
    with pytest.raises(ConfigError, match=message):
        next(document_states(target, documents, (0, 2), batch_tokens=16))
    assert len(list(document_states(target, documents, (0, 2), batch_tokens=50))) == 3


@pytest.mark.parametrize("kind", CHUNKABLE)
def test_a_target_of_16_bits_that_does_go_on_is_not(kind: str) -> None:
    target_states.check_chunks(random_target(kind).bfloat16(), 50, 16)


def test_nothing_to_read_is_refused(model: Any) -> None:
    documents = [torch.arange(3), torch.arange(0)]
    with pytest.raises(ConfigError, match="document 1 is empty"):
        next(document_states(model, documents, (1,)))
    with pytest.raises(ConfigError, match="0 tokens a forward pass"):
        next(document_states(model, documents[:1], (1,), batch_tokens=0))


def test_pieces_can_be_trained_on(model: Any) -> None:
    """No inference tensors: the drafter's first matrix saves them for its backward pass."""
    (piece,) = document_states(model, random_documents([8]), (1, 2))
    assert torch.is_grad_enabled()
    weight = torch.ones(64, 1, requires_grad=True)
    (piece.features @ weight).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], piece.features.sum(0))


def test_only_tapped_layers_outlive_their_use() -> None:
    model = random_target("llama")
    layers = decoder_layers(model)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal most
        alive.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        most = max(most, sum(ref() is not None for ref in alive))

    handles = [layer.register_forward_hook(count) for layer in layers]
    (ids,) = random_documents([12])
    with tapped_layers(model, (1,)) as collect, torch.no_grad():
        model.get_decoder()(input_ids=ids[None], use_cache=False)
        assert [ref() is not None for ref in alive] == [False, True, False, False]
        collect()
        assert not any(ref() is not None for ref in alive)
    # The tapped one, the layer's input and its output; without, all four.
    assert most == 3

    alive.clear()
    for piece in document_states(model, random_documents([40, 9]), (1,), batch_tokens=16):
        assert piece.features.shape[1] == 32
        # Of a whole pass only what the piece copied is left.
        assert not any(ref() is not None for ref in alive)
    assert len(alive) == 4 * (3 + 1) + 4 * (1 + 8)  # chunks and batch, and the probe's 1 + 8
    for handle in handles:
        handle.remove()


def test_a_target_is_probed_once() -> None:
    target = random_target("llama")
    passes: list[int] = []
    target.get_decoder().register_forward_hook(lambda *call: passes.append(1))
    for expected in (1 + 8 + 2, 2):
        assert len(list(document_states(target, random_documents([9]), (1,), batch_tokens=5))) == 2
        assert len(passes) == expected
        passes.clear()


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes, keys and values of the cache apart."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:2] + tensor.shape[3:] != (2, 8):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return output


def _largest_tensor(length: int) -> int:
    target, documents = random_target("llama"), random_documents([length])
    with _Largest() as largest:
        assert len(list(document_states(target, documents, (0, 2), batch_tokens=32))) == length / 32
    return largest.bytes


def test_activations_do_not_grow_with_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "_MASK_ENTRIES", 32 * 64)
    assert _largest_tensor(512) == _largest_tensor(128)
    # Transformers' own attention does not pass.
    monkeypatch.setattr(target_states, "bounded_attention", lambda model: nullcontext())
    assert _largest_tensor(512) == 4 * 32 * 512
    assert _largest_tensor(128) < 4 * 32 * 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_reads_what_the_cpu_reads(dtype: torch.dtype) -> None:
    target, documents = random_target("llama").to(dtype), random_documents([50, 7])
    for place in ("cpu", "cuda"):
        pieces = list(
            document_states(
                target.to("cuda"), documents, (0, 2), batch_tokens=16, output_device=place
            )
        )
        assert {p.features.device.type for p in pieces} == {place}
    features, _ = _whole(target.to("cpu"), documents[0])
    got = torch.cat([p.features for p in pieces if p.document == 0]).cpu()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert (got - features).norm() <= tolerance * features.norm()
