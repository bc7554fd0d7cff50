"""A target is described without its weights, and by them alone is it told from another."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.prepare_target import (
    Outline,
    PrepareTarget,
    check_weights,
    chosen_device,
    default_mask_token,
    small_files_checksum,
)
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import describe_target, load_target, target_checksum


def test_the_outline_says_what_the_loaded_target_says(target_folder: Path) -> None:
    expected = describe_target(load_target(target_folder), target_folder, "tiny", 257)
    outline = Outline.read(target_folder)
    assert outline.info("tiny", target_checksum(target_folder), 257) == expected
    assert outline.taps(None) == (1, 2)
    assert outline.taps((0, 4)) == (0, 4)
    with pytest.raises(ConfigError, match="target layer 5 does not exist"):
        outline.taps((0, 5))


def test_taps_are_spread_over_deep_targets() -> None:
    outline = Outline(40, 8, 100, (), None)
    assert outline.taps(None) == (1, 10, 19, 28, 37)
    assert outline.taps(None, 2) == (1, 37)


def test_weights_that_are_cut_short_are_named_without_loading(
    target_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    check_weights(folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for size in (len(content) - 1, 100, 0):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .*complete copy"):
            check_weights(folder)
    file.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file.name, "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 1 of its 2 weight files, model-2\.safetensors"):
        check_weights(folder)
    for broken in ("{", "[]", '{"weight_map": []}'):
        index.write_text(broken)
        with pytest.raises(ConfigError, match=r"index\.json is damaged"):
            check_weights(folder)


def test_an_embedding_of_other_rows_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    target = PrepareTarget(folder, "cpu", Stages())
    loaded = target.model
    assert target.model is loaded
    embedding, head = target.frozen()
    assert torch.equal(embedding, loaded.get_input_embeddings().weight)
    assert torch.equal(head, loaded.get_output_embeddings().weight)
    wrong = PrepareTarget(folder, "cpu", Stages())
    wrong.outline = Outline(5, 32, 259, (), None)
    with pytest.raises(ConfigError, match=r"258 rows in its embedding, .* vocab_size 259"):
        _ = wrong.model


def test_the_small_files_count_and_the_weights_do_not(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    before = small_files_checksum(folder)
    assert before == small_files_checksum(target_folder)
    (folder / "model.safetensors").write_bytes(b"other")
    assert small_files_checksum(folder) == before
    config = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert small_files_checksum(folder) != before
    assert Outline.read(folder).eos_token_ids == (3,)


@pytest.mark.parametrize(("known", "named", "expected"), [(5, None, 5), (5, 3, 3), (8, 7, 7)])
def test_mask_token_of_a_folder(known: int, named: int | None, expected: int) -> None:
    assert default_mask_token(_Tokenizer(known, named), 8) == expected


def test_a_full_vocabulary_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="name an unused one with --mask-token-id"):
        default_mask_token(_Tokenizer(8, None), 8)


def test_each_process_of_a_node_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [chosen_device("auto", rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert chosen_device("cuda", 5) == "cuda:1"
    assert chosen_device("cuda:3", 0) == "cuda:3"
    assert chosen_device("cpu", 1) == "cpu"
    with pytest.raises(ConfigError, match="--device cuda:4 is not there: torch sees 4 GPUs"):
        chosen_device("cuda:4", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen_device("auto", 1) == "cpu"
    with pytest.raises(ConfigError, match="--device cuda:0 is not there"):
        chosen_device("cuda", 1)


class _Tokenizer:
    def __init__(self, known: int, mask_token_id: int | None) -> None:
        self.known, self.mask_token_id = known, mask_token_id

    def __len__(self) -> int:
        return self.known
