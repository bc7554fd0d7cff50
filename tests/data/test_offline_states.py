"""Hidden states of another trainer's files as pieces: bounded, in order, finite."""

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_states import OfflineStates
from megatron_splitkv.data.specforge import SpecForgeData
from tests.data.offline_files import save_specforge

LENGTHS = (5, 9, 1, 6)


@pytest.fixture
def states(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    samples = [
        {
            "input_ids": torch.arange(n),
            "loss_mask": torch.ones(n),
            "hidden_states": torch.randn(1, n, 8),
            "target_last_hidden_states": torch.randn(1, n, 4),
        }
        for n in LENGTHS
    ]
    for number, sample in enumerate(samples):
        save_specforge(tmp_path, number, sample)
    return samples


def test_pieces_are_bounded_and_make_the_samples(
    tmp_path: Path, states: list[dict[str, torch.Tensor]]
) -> None:
    told: list[tuple[int, int]] = []
    numbers = {"train": [2, 1, 3, 0], "valid": [0]}
    reader = OfflineStates(SpecForgeData(tmp_path), numbers, piece_bytes=4 * (8 + 4) * 4)
    pieces = list(
        reader.read(
            "train",
            range(1, 4),
            [torch.arange(LENGTHS[number]) for number in (1, 3, 0)],
            lambda done, total: told.append((done, total)),
        )
    )
    assert [(p.document, p.start, len(p.features)) for p in pieces] == [
        *[(0, 0, 4), (0, 4, 4), (0, 8, 1)],
        *[(1, 0, 4), (1, 4, 2)],
        *[(2, 0, 4), (2, 4, 1)],
    ]
    for document, number in enumerate((1, 3, 0)):
        own = [p for p in pieces if p.document == document]
        assert torch.equal(torch.cat([p.features for p in own]), states[number]["hidden_states"][0])
        final = torch.cat([p.final_hidden for p in own])
        assert torch.equal(final, states[number]["target_last_hidden_states"][0])
    assert told == [(done, 20) for done in (4, 8, 9, 13, 15, 19, 20)]


def test_a_row_larger_than_a_piece_comes_alone(
    tmp_path: Path, states: list[dict[str, torch.Tensor]]
) -> None:
    reader = OfflineStates(SpecForgeData(tmp_path), {"valid": [0]}, piece_bytes=1)
    pieces = list(reader.read("valid", range(1), [torch.arange(5)]))
    assert [(p.start, len(p.features)) for p in pieces] == [(i, 1) for i in range(5)]


def test_final_states_go_through_the_norm_in_its_own_dtype(
    tmp_path: Path, states: list[dict[str, torch.Tensor]]
) -> None:
    norm = nn.RMSNorm(4).double()
    norm.weight.data.uniform_(0.5, 2)
    reader = OfflineStates(SpecForgeData(tmp_path), {"train": [3]}, lambda: norm)
    (piece,) = reader.read("train", range(1), [torch.arange(6)])
    expected = norm(states[3]["target_last_hidden_states"][0].double())
    assert torch.equal(piece.final_hidden, expected)
    assert torch.equal(piece.features, states[3]["hidden_states"][0])


@pytest.mark.parametrize("name", ["hidden_states", "target_last_hidden_states"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_named(
    tmp_path: Path, states: list[dict[str, torch.Tensor]], name: str, value: float
) -> None:
    states[1][name][0, 6, 3] = value
    path = save_specforge(tmp_path, 1, states[1])
    reader = OfflineStates(SpecForgeData(tmp_path), {"train": [1]}, piece_bytes=4 * (8 + 4) * 4)
    with pytest.raises(ConfigError, match="the hidden states of token 6 are not finite") as caught:
        list(reader.read("train", range(1), [torch.arange(9)]))
    assert str(path) in str(caught.value)


def test_a_file_that_changed_on_the_way_is_named(
    tmp_path: Path, states: list[dict[str, torch.Tensor]]
) -> None:
    reader = OfflineStates(SpecForgeData(tmp_path), {"train": [1]})
    with pytest.raises(ConfigError, match=r"data_1.ckpt has other tokens than when its prepar"):
        list(reader.read("train", range(1), [torch.arange(9) + 1]))
