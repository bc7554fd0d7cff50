"""Reading speculators' datasets and hidden states: layout, rows on demand, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import speculators_data
from megatron_splitkv.data.speculators_data import ArrowRows, SpeculatorsData, TokenRow

# Three rows of 7, 5 and 9 tokens in two files, as `datasets` 5.0.1 saved them:
# Dataset.from_dict({"input_ids": ..., "loss_mask": ..., "seq_len": ...}).save_to_disk(num_shards=2)
SAVED_BY_DATASETS = Path(__file__).parent / "speculators_dataset"
SAVED_IDS = [
    [24, 26, 2, 16, 32, 31, 25],
    [19, 30, 22, 37, 13],
    [32, 8, 18, 8, 6, 39, 16, 34, 38],
]

ROWS: list[TokenRow] = [
    (np.arange(n, dtype=np.int64), np.arange(n) >= 2) for n in (4, 6, 5, 3, 4, 4, 4, 4, 4, 4, 7)
]


def save_states(folder: Path, row: int, planes: int = 3, width: int = 4) -> torch.Tensor:
    length = len(ROWS[row][0])
    states = torch.randn(length, planes, width).bfloat16()
    (folder / "hidden_states").mkdir(exist_ok=True)
    save_file(
        {"token_ids": torch.arange(length), "hidden_states": states},
        folder / "hidden_states" / f"hs_{row}.safetensors",
    )
    return states


def test_planes_are_the_taps_and_then_the_last_layer(tmp_path: Path) -> None:
    states = save_states(tmp_path, 1)
    data = SpeculatorsData(tmp_path, ROWS)
    assert (len(data), data.num_rows) == (1, 11)
    sample = data.open(0)
    assert torch.equal(sample.token_ids, torch.arange(6))
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True]
    assert (sample.feature_width, sample.final_width, sample.dtype) == (8, 4, torch.bfloat16)
    features, final = sample.read(1, 4)
    assert torch.equal(features, torch.cat([states[1:4, 0], states[1:4, 1]], dim=1))
    assert final is not None
    assert torch.equal(final, states[1:4, 2])


def test_rows_without_a_file_are_left_out_and_the_others_keep_their_number(tmp_path: Path) -> None:
    for row in (10, 2, 3):
        save_states(tmp_path, row)
    (tmp_path / "hidden_states" / "hs_2.safetensors.lock").touch()
    (tmp_path / "hidden_states" / "hs_new.safetensors").touch()
    data = SpeculatorsData(tmp_path, ROWS)
    opened = [data.open(i) for i in range(len(data))]
    assert [sample.path.stem for sample in opened] == ["hs_2", "hs_3", "hs_10"]
    assert [sample.num_tokens for sample in opened] == [5, 3, 7]


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    save_states(tmp_path, 1)
    other = ROWS[1][0].copy()
    other[3] = 9
    rows = [ROWS[0], (other, ROWS[1][1])]
    with pytest.raises(ConfigError, match=r"hs_1.safetensors: token 3 is 3, but 9 in row 1"):
        SpeculatorsData(tmp_path, rows).open(0)
    rows = [ROWS[0], (other[:4], ROWS[1][1])]
    with pytest.raises(ConfigError, match="input_ids 4, loss_mask 6, token_ids 6, hidden_states 6"):
        SpeculatorsData(tmp_path, rows).open(0)
    with pytest.raises(ConfigError, match=r"hs_1.safetensors belongs to row 1, .* has 1 rows"):
        SpeculatorsData(tmp_path, rows[:1])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"token_ids": torch.arange(4)}, "cannot be read as token_ids and hidden_states: "),
        (
            {"token_ids": torch.arange(4), "hidden_states": torch.ones(4, 8)},
            r"hidden_states \[4, 8\], expected \[S\] and \[S, layers \+ 1, d\]",
        ),
        (
            {"token_ids": torch.arange(4), "hidden_states": torch.ones(4, 1, 8)},
            r"hidden_states \[4, 1, 8\], expected",
        ),
    ],
)
def test_another_layout_is_named(
    tmp_path: Path, content: dict[str, torch.Tensor], line: str
) -> None:
    (tmp_path / "hidden_states").mkdir()
    save_file(content, tmp_path / "hidden_states" / "hs_0.safetensors")
    with pytest.raises(ConfigError, match=rf"hs_0.safetensors.*{line}") as caught:
        SpeculatorsData(tmp_path, ROWS).open(0)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_states(tmp_path, 0)
    path = tmp_path / "hidden_states" / "hs_0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"hs_0.safetensors cannot be read"):
        SpeculatorsData(tmp_path, ROWS).open(0)


def test_folders_without_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; name the --output of speculators'"):
        SpeculatorsData(tmp_path / "absent", ROWS)
    with pytest.raises(ConfigError, match=r"hidden_states holds no hs_\*.safetensors"):
        SpeculatorsData(tmp_path, ROWS)


def test_without_pyarrow_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(speculators_data.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="needs pyarrow; install it with `pip install pyarrow`"):
        ArrowRows(SAVED_BY_DATASETS)


def test_rows_of_a_dataset_that_datasets_saved() -> None:
    pytest.importorskip("pyarrow")
    rows = ArrowRows(SAVED_BY_DATASETS)
    assert len(rows) == 3
    for row, ids in enumerate(SAVED_IDS):
        token_ids, loss_mask = rows[row]
        assert (token_ids.dtype, loss_mask.dtype) == (np.int64, np.bool_)
        assert token_ids.tolist() == ids
        assert loss_mask.tolist() == [False] * 3 + [True] * (len(ids) - 3)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="is no dataset with input_ids and loss_mask"):
        ArrowRows(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(SAVED_BY_DATASETS, broken)
    file = broken / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ConfigError, match="is no dataset with"):
        ArrowRows(broken)
    (broken / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(ConfigError, match="is no dataset with"):
        ArrowRows(broken)


def test_a_row_without_tokens_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"input_ids": [[5, 6], None], "loss_mask": [[0, 1], [0, 1]]})
    with (
        arrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    rows = ArrowRows(tmp_path)
    assert rows[0][0].tolist() == [5, 6]
    with pytest.raises(ConfigError, match="row 1 of the dataset has no input_ids or no loss_mask"):
        rows[1]
