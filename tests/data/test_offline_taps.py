"""Which layers another trainer tapped: found by the target, and refused where they are others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_taps import (
    TappedStates,
    find_final_norm,
    find_tapped_layers,
    find_tapped_states,
)
from megatron_splitkv.data.specforge import SpecForgeData
from megatron_splitkv.data.speculators_data import SpeculatorsData
from megatron_splitkv.data.target import load_target
from tests.data.offline_files import (
    dspark_sample,
    hidden_states,
    save_specforge,
    save_speculators,
    specforge_sample,
)

IDS = torch.arange(30, 70)
MASK = torch.arange(40) >= 8


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    target = load_target(target_folder)
    # A norm of ones could be told from no norm by the rows' lengths alone.
    target.model.norm.weight.data.uniform_(0.5, 2.0)
    return target


def specforge(folder: Path, sample: dict[str, torch.Tensor]) -> SpecForgeData:
    save_specforge(folder, 0, sample)
    return SpecForgeData(folder)


def speculators(folder: Path, model: Any, layer_ids: tuple[int, ...]) -> SpeculatorsData:
    save_speculators(folder, 0, model, IDS, layer_ids)
    return SpeculatorsData(folder, [(IDS.numpy().astype(np.int64), MASK.numpy())])


def test_specforge_numbers_layers_as_we_do(tmp_path: Path, model: Any) -> None:
    data = specforge(tmp_path, specforge_sample(model, IDS, MASK, (0, 2, 4)))
    tapped = TappedStates((0, 2, 4), None)
    assert find_tapped_states(model, data, data.open(0)) == tapped
    assert find_tapped_states(model, data, data.open(0), (0, 2, 4)) == tapped


def test_speculators_counts_the_embedding(tmp_path: Path, model: Any) -> None:
    data = speculators(tmp_path, model, (1, 3, 4))
    tapped = TappedStates((0, 2, 3), final_normed=False)
    assert find_tapped_states(model, data, data.open(0)) == tapped
    with pytest.raises(
        ConfigError,
        match=r"hs_0.safetensors holds the outputs of target layers 0,2,3 \(speculators names them "
        r"1,3,4\), not of 1,3,4; give --target-layer-ids 0,2,3",
    ):
        find_tapped_states(model, data, data.open(0), (1, 3, 4))


def test_final_states_behind_the_norm_are_told_from_those_in_front_of_it(
    tmp_path: Path, model: Any
) -> None:
    sample = dspark_sample(model, IDS, MASK, (1, 3))
    data = specforge(tmp_path, sample)
    assert find_tapped_states(model, data, data.open(0)) == TappedStates((1, 3), True)
    raw = hidden_states(model, IDS)[0][-1]
    data = specforge(tmp_path, {**sample, "target_last_hidden_states": raw[None]})
    assert find_tapped_states(model, data, data.open(0)) == TappedStates((1, 3), False)
    torch.testing.assert_close(
        find_final_norm(model)(raw), sample["target_last_hidden_states"][0], rtol=0, atol=0
    )


def test_rounding_and_one_huge_row_change_nothing(tmp_path: Path, model: Any) -> None:
    sample = specforge_sample(model, IDS, MASK, (1, 2))
    states = sample["hidden_states"].bfloat16().float()
    states = states + 0.05 * states.abs() * torch.randn(states.shape)
    states[:, 0] = 1e4
    data = specforge(tmp_path, {**sample, "hidden_states": states.bfloat16()})
    assert find_tapped_states(model, data, data.open(0)).target_layer_ids == (1, 2)


def test_a_single_token_is_enough(tmp_path: Path, model: Any) -> None:
    data = specforge(tmp_path, specforge_sample(model, IDS[:1], MASK[:1], (2, 3)))
    assert find_tapped_states(model, data, data.open(0)).target_layer_ids == (2, 3)


def test_a_folder_that_was_prepared_twice_is_refused(tmp_path: Path, model: Any) -> None:
    for number in range(40):
        save_specforge(tmp_path, number, specforge_sample(model, IDS, MASK, (0, 2, 4)))
    assert find_tapped_layers(model, SpecForgeData(tmp_path)) == TappedStates((0, 2, 4), None)
    # The second preparation made what the first had not come to.
    for number in range(37, 40):
        save_specforge(tmp_path, number, specforge_sample(model, IDS, MASK, (0, 1, 4)))
    with pytest.raises(
        ConfigError,
        match=r"data_39.ckpt holds target layers 0,1,4, data_0.ckpt target layers 0,2,4; import "
        "data of one preparation at a time",
    ):
        find_tapped_layers(model, SpecForgeData(tmp_path))


def test_another_target_is_refused(tmp_path: Path, model: Any) -> None:
    other = dspark_sample(model, IDS.flip(0), MASK, (1, 3))
    data = specforge(tmp_path, {**other, "input_ids": IDS})
    with pytest.raises(ConfigError, match=r"layer plane 0 is \d+% away from the closest layer"):
        find_tapped_states(model, data, data.open(0))


def test_the_last_hidden_state_is_no_tap(tmp_path: Path, model: Any) -> None:
    sample = specforge_sample(model, IDS, MASK, (1, 3))
    # As `output_hidden_states` gives the last layer: behind the final norm.
    states = torch.cat([sample["hidden_states"], hidden_states(model, IDS)[1][None]], dim=-1)
    data = specforge(tmp_path, {**sample, "hidden_states": states})
    with pytest.raises(ConfigError, match="layer plane 2 holds what the head reads"):
        find_tapped_states(model, data, data.open(0))


def test_states_without_the_last_layer_are_refused(tmp_path: Path, model: Any) -> None:
    # speculators' --no-include-last-layer: the plane that would be dropped is a tap.
    data = speculators(tmp_path, model, (1, 2, 3))
    sample = data.open(0)
    planes = sample.read(0, 40)[0]
    cut = replace(sample, feature_width=64, read=lambda a, b: (planes[a:b, :64], planes[a:b, 64:]))
    with pytest.raises(ConfigError, match="last plane is the output of target layer 2, expected"):
        find_tapped_states(model, data, cut)


@pytest.mark.parametrize(
    ("width", "named", "line"),
    [
        (64, (1, 2, 3), "rows of 64 numbers are 2 layers of 32, but --target-layer-ids names 3"),
        (48, None, "rows of 48 numbers are no whole layers of the target, whose hidden size is 32"),
    ],
)
def test_widths_that_do_not_fit_are_refused(
    tmp_path: Path, model: Any, width: int, named: tuple[int, ...] | None, line: str
) -> None:
    sample = specforge_sample(model, IDS, MASK, (1, 2))
    data = specforge(tmp_path, {**sample, "hidden_states": sample["hidden_states"][..., :width]})
    with pytest.raises(ConfigError, match=line):
        find_tapped_states(model, data, data.open(0), named)


def test_final_states_of_another_width_are_refused(tmp_path: Path, model: Any) -> None:
    sample = dspark_sample(model, IDS, MASK, (1, 2))
    sample["target_last_hidden_states"] = sample["target_last_hidden_states"][..., :16]
    data = specforge(tmp_path, sample)
    with pytest.raises(ConfigError, match="rows of 16 numbers are no whole layers"):
        find_tapped_states(model, data, data.open(0))


@pytest.mark.parametrize("token", [-1, 258])
def test_tokens_that_the_target_lacks_are_refused(tmp_path: Path, model: Any, token: int) -> None:
    sample = specforge_sample(model, IDS, MASK, (1, 2))
    ids = IDS.clone()
    ids[5] = token
    data = specforge(tmp_path, {**sample, "input_ids": ids})
    with pytest.raises(ConfigError, match=f"has token {token}, outside the target's vocabulary"):
        find_tapped_states(model, data, data.open(0))
