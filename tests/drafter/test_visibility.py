"""Who sees whom, for every kind of drafter: each input row is changed, each output row watched.

A row that a slot does not see leaves that slot's output bitwise as it was and has a gradient of
exactly zero; one that it sees does not. All rows of a small pack are tried, one after the other.
"""

from dataclasses import fields, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.config import DRAFTERS
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.drafter.kinds import config_class
from tests.drafter.harness import TINY, build_model, make_sample, on_ranks, parallel_state

# Ranks that import Megatron on a busy machine take their time.

LENGTHS = [16, 9]
ANCHORS = [3, 6, 7, 14, 17, 22]  # blocks of the first document overlap, the last runs over its end
STARTS = [0, 0, 0, 0, 16, 16]
SAMPLE = make_sample(LENGTHS, np.ones(sum(LENGTHS)), anchors=ANCHORS, seed=3)
B, N, LENGTH, WINDOW = TINY.block_size, len(ANCHORS), sum(LENGTHS), 5
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": WINDOW},
    "sliding": {"layer_types": ("sliding_attention",), "num_layers": 1, "sliding_window": WINDOW},
}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "domino": {"emb_dim": 6, "gru_hidden_dim": 8},
    "dspark": {"markov_rank": 6},
}
CASES = [(kind, layers, cp) for kind in DRAFTERS for layers, cp in (("full", 2), ("sliding", 1))]
CASES += [("dflash", "mixed", 2), ("dflash", "sliding", 2)]

type Differences = dict[str, NDArray[np.bool_]]


def drafter_of(kind: str, layers: str) -> DFlashConfig:
    values = {field.name: getattr(TINY, field.name) for field in fields(TINY)}
    values |= {"layer_types": ()} | LAYERS[layers] | HEADS[kind]
    return config_class(kind)(**values)


class Watched:
    """A model on this rank whose block rows can be changed and whose inputs have gradients."""

    def __init__(self, drafter: DFlashConfig, cp: int) -> None:
        from megatron.core import parallel_state as state

        self.model = build_model(1, cp, dflash=drafter)
        self.model.training_progress = 0.5  # Domino's loss is its head's by then
        self.plan = SAMPLE.plan(cp, drafter.windows)
        self.rank = state.get_context_parallel_rank()
        self.blocks = self.plan.blocks(self.rank)
        self.options = {"label_shift": drafter.label_shift, "teacher": True}
        self.batch = self.batch_of(SAMPLE.features)
        self.inputs: dict[str, torch.Tensor] = {}
        self.change: torch.Tensor | float = 0.0
        self.embed_blocks = self.model.vocabulary.embed_blocks
        self.model.hidden_norm.register_forward_hook(lambda _, __, out: self.leaf("context", out))

    def batch_of(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return replace(SAMPLE, features=features).batch(self.plan, self.rank, **self.options)

    def leaf(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        self.inputs[name] = rows.detach().clone().requires_grad_()
        return self.inputs[name]

    def draft(self) -> torch.Tensor:
        def embed(*args: Any) -> torch.Tensor:
            return self.leaf("slots", self.embed_blocks(*args) + self.change)

        with mock.patch.object(self.model.vocabulary, "embed_blocks", embed):
            hidden: torch.Tensor = self.model.draft(self.batch, self.plan)
        return hidden

    def losses(self, hidden: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The loss of each group of slots by itself; bool ``[groups, n, B]`` -> ``[groups]``."""
        trained = self.batch["block_label_mask"].view(1, -1, B) & groups
        weights = trained.flatten(1).float()
        return torch.stack([self.model.loss(hidden, self.batch, w)[0] for w in weights])

    def outputs(self) -> list[torch.Tensor]:
        """Rows of the backbone, and the loss of each block."""
        with torch.no_grad():
            hidden = self.draft()
            own = torch.eye(len(self.blocks), dtype=torch.bool)[:, :, None].expand(-1, -1, B)
            return [hidden.view(len(self.blocks), B, -1), self.losses(hidden, own)]

    def slot_losses(self) -> torch.Tensor:
        with torch.no_grad():
            rows = len(self.blocks) * B
            each = torch.eye(rows, dtype=torch.bool).view(rows, -1, B)
            return self.losses(self.draft(), each).view(-1, B)


def look(kind: str, layers: str, cp: int) -> Differences:
    """What depends on what, over all ranks.

    Shape:
        context ``[LENGTH, N, B]``, slots ``[N, B, N, B]``: the backbone's rows by input row;
        context_loss, slots_loss without the last axis; tokens ``[N, B, N, B]``: the slots' losses
        by the real token at a slot; context_grad ``[LENGTH, N]`` and slots_grad ``[N, B, N]``.
    """
    from megatron.core import parallel_state as state

    with parallel_state(1, cp):
        watched = Watched(drafter_of(kind, layers), cp)
        blocks, batch = watched.blocks, watched.batch
        before, before_tokens = watched.outputs(), watched.slot_losses()
        found: dict[str, list[Any]] = {name: [] for name in ("context", "slots", "tokens", "grad")}

        def differences() -> list[NDArray[np.bool_]]:
            rows, losses = (a != b for a, b in zip(watched.outputs(), before, strict=True))
            return [rows.any(-1).numpy(), losses.numpy()]

        for row in range(LENGTH):
            features = SAMPLE.features.clone()
            features[row] += 3.0 * torch.randn(TINY.feature_width)
            watched.batch = watched.batch_of(features)
            found["context"].append(differences())
        watched.batch = batch

        for block in range(N):
            for slot in range(B):
                at = torch.zeros(len(blocks), B, dtype=torch.bool)
                at[torch.from_numpy(blocks == block), slot] = True
                watched.change = at.view(-1, 1) * torch.linspace(-2, 3, TINY.hidden_size)
                found["slots"].append(differences())
                watched.change = 0.0
                tokens = batch["block_real_tokens"]
                others = (tokens + 1) % TINY.mask_token_id
                watched.batch = batch | {
                    "block_real_tokens": torch.where(at.view(-1), others, tokens)
                }
                found["tokens"].append((watched.slot_losses() != before_tokens).numpy())
                watched.batch = batch

        for block in range(N):
            only = torch.from_numpy(blocks == block)[None, :, None].expand(1, -1, B)
            watched.losses(watched.draft(), only).sum().backward()
            grads = [watched.inputs[name].grad for name in ("context", "slots")]
            assert all(grad is not None for grad in grads)
            found["grad"].append([(grad.flatten(1) != 0).any(-1).numpy() for grad in grads])

        mine = (blocks, watched.plan.rows(watched.rank), found)
        ranks: list[Any] = [None] * cp
        dist.all_gather_object(ranks, mine, group=state.get_context_parallel_group())
    return assembled(ranks)


def assembled(ranks: list[Any]) -> Differences:
    everything = {
        "context": np.zeros((LENGTH, N, B), bool),
        "context_loss": np.zeros((LENGTH, N), bool),
        "slots": np.zeros((N * B, N, B), bool),
        "slots_loss": np.zeros((N * B, N), bool),
        "tokens": np.zeros((N * B, N, B), bool),
        "context_grad": np.zeros((LENGTH, N), bool),
        "slots_grad": np.zeros((N, B, N), bool),
    }
    for blocks, rows, found in ranks:
        for name in ("context", "slots"):
            everything[name][:, blocks] = np.stack([a for a, _ in found[name]])
            everything[f"{name}_loss"][:, blocks] = np.stack([b for _, b in found[name]])
        everything["tokens"][:, blocks] = np.stack(found["tokens"])
        everything["context_grad"][rows] = np.stack([a for a, _ in found["grad"]], axis=1)
        slots = np.stack([b.reshape(-1, B) for _, b in found["grad"]], axis=2)
        everything["slots_grad"][blocks] = slots
    return everything


@cache
def seen(kind: str, layers: str, cp: int) -> Differences:
    first, *others = on_ranks(2, look, kind, layers, cp)
    for other in others:
        assert all(np.array_equal(other[name], first[name]) for name in first)
    return first


def visible_context(layers: str) -> NDArray[np.bool_]:
    """bool[LENGTH, N, B]: its own document, strictly before the anchor, within the window."""
    row = np.arange(LENGTH)[:, None, None]
    anchor, start = np.array(ANCHORS)[:, None], np.array(STARTS)[:, None]
    visible = (row >= start) & (row < anchor) & (np.arange(B) >= 0)
    # A layer of full attention lets everything through, whatever the others hide.
    return visible & (anchor + np.arange(B) - row < WINDOW) if layers == "sliding" else visible


def visible_slots(layers: str) -> NDArray[np.bool_]:
    """bool[N, B, N, B]: slots of the own block; in sliding layers none behind the query."""
    slots = np.arange(B)
    inside = slots[:, None] <= slots if layers == "sliding" else np.ones((B, B), bool)
    return np.eye(N, dtype=bool)[:, None, :, None] & inside[None, :, None, :]


def trained_slots(kind: str) -> NDArray[np.bool_]:
    """bool[N, B]: slots with a label inside the document."""
    shift = drafter_of(kind, "full").label_shift
    label = np.array(ANCHORS)[:, None] + np.arange(B) + shift
    ends = np.where(np.array(STARTS) == 0, LENGTHS[0], LENGTH)[:, None]
    return (label > np.array(ANCHORS)[:, None]) & (label < ends)


@pytest.mark.parametrize(("kind", "layers", "cp"), CASES)
def test_context_reaches_the_slots_that_see_it_and_no_others(
    kind: str, layers: str, cp: int
) -> None:
    """At and after the anchor, in other documents, W or more positions back: nothing."""
    found, visible = seen(kind, layers, cp), visible_context(layers)
    np.testing.assert_array_equal(found["context"], visible)
    priced = (visible & trained_slots(kind)).any(-1)
    np.testing.assert_array_equal(found["context_loss"], priced)
    np.testing.assert_array_equal(found["context_grad"], priced)


@pytest.mark.parametrize(("kind", "layers", "cp"), CASES)
def test_slots_reach_their_own_block_and_no_other(kind: str, layers: str, cp: int) -> None:
    found, visible = seen(kind, layers, cp), visible_slots(layers)
    np.testing.assert_array_equal(found["slots"].reshape(visible.shape), visible)
    priced = (visible & trained_slots(kind)).any(-1)
    np.testing.assert_array_equal(found["slots_loss"].reshape(priced.shape), priced)
    np.testing.assert_array_equal(found["slots_grad"], priced)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_slot_is_told_its_own_label_or_what_follows(kind: str) -> None:
    """Real tokens reach the heads of slots of the same block whose label lies behind them."""
    told = seen(kind, "full", 2)["tokens"].reshape(N, B, N, B)
    shift, slots = drafter_of(kind, "full").label_shift, np.arange(B)
    before_label = slots[:, None] < slots + shift  # token at slot k, label of slot j
    may = np.eye(N, dtype=bool)[:, None, :, None] & before_label[None, :, None, :]
    assert not (told & ~may).any()
    if kind == "dflash":
        assert not told.any()
    else:  # the token right before the label, wherever there is a label
        last = np.eye(N, dtype=bool)[:, None, :, None] & np.eye(B, dtype=bool)[None, :, None, :]
        reached = (told & last).any((0, 1))
        np.testing.assert_array_equal(reached[:, 1:], trained_slots(kind)[:, 1:])


def test_the_windows_are_narrower_than_the_documents() -> None:
    assert visible_context("full").sum() > visible_context("sliding").sum() > 0
