"""Other trainers' hidden states as a run folder: the same as those that prepare stores itself."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.feature_units import TargetStates
from megatron_splitkv.data.offline_data import OfflineData
from megatron_splitkv.data.offline_states import OfflineStates
from megatron_splitkv.data.prepare import PrepareOptions, prepare
from megatron_splitkv.data.recipe_import import ImportRecipe, _prompt_tokens
from megatron_splitkv.data.specforge import SpecForgeData
from megatron_splitkv.data.speculators_data import SpeculatorsData, TokenRow
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import load_target
from tests.data.offline_files import (
    dspark_sample,
    eagle3_sample,
    save_specforge,
    save_speculators,
    specforge_sample,
)

TAPS = (0, 2, 4)
# The ids that speculators' user gave to vLLM for the same layers.
THEIR_TAPS = (1, 3, 5)
LENGTHS = [12 + 7 * i % 23 for i in range(20)]
# Nothing to train on: left out.
LEFT_OUT = (3, 15)


def documents() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, 256, (length,), generator=generator)
        mask = torch.arange(length) >= 5
        yield ids, mask & torch.tensor(number not in LEFT_OUT)


class FromTokens(ImportRecipe):
    """The same samples, but the target reads them: what prepare does with text."""

    def states(self, target: Any, meta: Any, options: PrepareOptions, samples: Any) -> Any:
        return TargetStates(lambda: target.model, meta, options.batch_tokens)

    def taps(self, target: Any, options: PrepareOptions, job: Any) -> tuple[int, ...]:
        return TAPS


@pytest.fixture(scope="module")
def target(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose final norm is no norm of ones."""
    folder = tmp_path_factory.mktemp("normed") / "target"
    shutil.copytree(target_folder, folder)
    model = load_target(folder)
    model.model.norm.weight.data.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def specforge(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DSpark's layout, every third file compressed."""
    folder = tmp_path_factory.mktemp("specforge")
    model = load_target(target)
    for number, (ids, mask) in enumerate(documents()):
        save_specforge(folder, number, dspark_sample(model, ids, mask, TAPS), number % 3 == 0)
    return folder


@pytest.fixture(scope="module")
def speculators(target: Path, tmp_path_factory: pytest.TempPathFactory) -> SpeculatorsData:
    folder = tmp_path_factory.mktemp("speculators")
    model = load_target(target)
    rows: list[TokenRow] = []
    for number, (ids, mask) in enumerate(documents()):
        save_speculators(folder, number, model, ids, THEIR_TAPS)
        rows.append((ids.numpy().astype(np.int64), mask.numpy()))
    return SpeculatorsData(folder, rows)


@pytest.fixture(scope="module")
def own(target: Path, specforge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare stores when the target reads the same tokens."""
    output = tmp_path_factory.mktemp("own") / "run"
    prepare(FromTokens(target, SpecForgeData(specforge)), output, PrepareOptions(final_hidden=True))
    return output


def imported(
    output: Path, target: Path, data: OfflineData, **options: Any
) -> tuple[dict[str, Any], dict[str, FeatureStore]]:
    summary = prepare(ImportRecipe(target, data), output, PrepareOptions(**options))
    assert summary is not None
    return summary, {name: FeatureStore(output / name, "full") for name in ("train", "valid")}


def tree(folder: Path) -> dict[str, str]:
    """Checksums of a run's files; of the summary, what is not time."""
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "prepare.json"
    }
    summary = json.loads((folder / "prepare.json").read_text())
    del summary["seconds"]
    return found | {"prepare.json": json.dumps(summary)}


def assert_equal_stores(ours: FeatureStore, theirs: FeatureStore, *, final_hidden: bool) -> None:
    assert ours.lengths.tolist() == theirs.lengths.tolist()
    for document, length in enumerate(ours.lengths.tolist()):
        assert ours.token_ids(document).tolist() == theirs.token_ids(document).tolist()
        assert ours.loss_mask(document).tolist() == theirs.loss_mask(document).tolist()
        readers = [(ours.read_features, theirs.read_features)]
        if final_hidden:
            readers.append((ours.read_final_hidden, theirs.read_final_hidden))
        for one, other in readers:
            expected, found = one(document, 0, length), other(document, 0, length)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
@pytest.mark.parametrize("final_hidden", [False, True])
def test_imported_states_are_those_that_prepare_stores(
    tmp_path: Path,
    target: Path,
    own: Path,
    specforge: Path,
    speculators: SpeculatorsData,
    layout: str,
    final_hidden: bool,
) -> None:
    data = SpecForgeData(specforge) if layout == "specforge" else speculators
    summary, stores = imported(tmp_path / "run", target, data, final_hidden=final_hidden)
    assert summary["target_layer_ids"] == list(TAPS)
    for name, store in stores.items():
        expected = FeatureStore(own / name)
        assert store.meta.target == expected.meta.target
        assert store.meta.final_hidden is final_hidden
        assert_equal_stores(expected, store, final_hidden=final_hidden)
    for mine, theirs in zip(
        stores["train"].frozen(), FeatureStore(own / "train").frozen(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert (tmp_path / "run/prompts.jsonl").read_text() == (own / "prompts.jsonl").read_text()


def test_samples_keep_their_order_and_every_sixteenth_usable_one_is_held_out(
    tmp_path: Path, target: Path, specforge: Path
) -> None:
    summary, stores = imported(tmp_path / "run", target, SpecForgeData(specforge))
    kept = [number for number in range(20) if number not in LEFT_OUT]
    given = list(documents())
    held_out = kept[15]
    train = [number for number in kept if number != held_out]
    assert len(stores["train"]) == len(train) == 17
    for document, number in enumerate(train):
        assert stores["train"].token_ids(document).tolist() == given[number][0].tolist()
    assert stores["valid"].token_ids(0).tolist() == given[held_out][0].tolist()
    assert len(stores["valid"]) == 1
    prompt = json.loads((tmp_path / "run/prompts.jsonl").read_text())
    assert prompt["id"] == f"sample-{held_out}"
    assert prompt["token_ids"] == given[held_out][0][:5].tolist()
    assert summary["without_response"] == 2
    assert (summary["imported_from"], summary["samples"]) == ("SpecForge", 20)


def test_of_few_samples_the_last_is_held_out(tmp_path: Path, target: Path) -> None:
    model = load_target(target)
    given = list(documents())
    for number in (2, 3, 4):  # 3 has nothing to train on
        save_specforge(tmp_path / "data", number, specforge_sample(model, *given[number], TAPS))
    _, stores = imported(tmp_path / "run", target, SpecForgeData(tmp_path / "data"))
    assert [len(stores["train"]), len(stores["valid"])] == [1, 1]
    assert stores["valid"].token_ids(0).tolist() == given[4][0].tolist()
    (tmp_path / "data/rows_0-2000/data_4.ckpt").unlink()
    with pytest.raises(ConfigError, match="1 usable samples of 2 are too few"):
        imported(tmp_path / "again", target, SpecForgeData(tmp_path / "data"))
    assert not (tmp_path / "again").exists()


def test_eagle3_files_are_the_same_states(tmp_path: Path, target: Path, own: Path) -> None:
    model = load_target(target)
    for number, (ids, mask) in enumerate(documents()):
        save_specforge(tmp_path / "data", number, eagle3_sample(model, ids, mask, TAPS))
    data = SpecForgeData(tmp_path / "data")
    _, stores = imported(tmp_path / "run", target, data, final_hidden=True)
    assert_equal_stores(FeatureStore(own / "train"), stores["train"], final_hidden=True)


def test_named_layers_must_be_those_of_the_files(
    tmp_path: Path, target: Path, speculators: SpeculatorsData
) -> None:
    with pytest.raises(ConfigError, match=r"\(speculators names them 1,3,5\), not of 1,3,4"):
        imported(tmp_path / "run", target, speculators, target_layer_ids=(1, 3, 4))
    with pytest.raises(ConfigError, match="target layer 5 does not exist: the target has 5 layers"):
        imported(tmp_path / "run", target, speculators, target_layer_ids=THEIR_TAPS)
    assert not (tmp_path / "run/train").exists()
    summary, _ = imported(tmp_path / "named", target, speculators, target_layer_ids=TAPS)
    assert summary["target_layer_ids"] == list(TAPS)


def test_bfloat16_states_are_copied_bit_by_bit(tmp_path: Path, target: Path) -> None:
    model = load_target(target)
    given = list(documents())[:3]
    states = []
    for number, (ids, mask) in enumerate(given):
        sample = specforge_sample(model, ids, mask, TAPS)
        sample["hidden_states"] = sample["hidden_states"].bfloat16()
        states.append(sample["hidden_states"][0])
        save_specforge(tmp_path / "data", number, sample)
    recipe = ImportRecipe(target, SpecForgeData(tmp_path / "data"))
    assert recipe.dtype == "bfloat16"
    prepare(recipe, tmp_path / "run", PrepareOptions(dtype=recipe.dtype))
    store = FeatureStore(tmp_path / "run/train")
    assert [torch.equal(store.read_features(i, 0, len(states[i])), states[i]) for i in (0, 1)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_states": lambda s: s[..., :64]}, "has feature width 64, data_0.ckpt has 96"),
        ({"hidden_states": lambda s: s.half()}, "has dtype torch.float16, data_0.ckpt has"),
        (
            {"input_ids": lambda s: s + 250},
            r"data_1.ckpt has token \d+, outside the target's vocabulary of 258",
        ),
        (
            {"input_ids": lambda s: s.flip(0)},
            r"data_1.ckpt: layer plane 0 is \d+% away from the closest layer of the target",
        ),
        (
            {"hidden_states": lambda s: s / torch.zeros(1, s.shape[1], 1)},
            r"data_1.ckpt: layer plane 0 is not finite",
        ),
    ],
)
def test_samples_that_do_not_fit_are_named(
    tmp_path: Path, target: Path, change: dict[str, Any], line: str
) -> None:
    model = load_target(target)
    for number, (ids, mask) in zip(range(3), documents(), strict=False):
        sample = specforge_sample(model, ids, mask, TAPS)
        if number == 1:
            sample |= {name: edit(sample[name]) for name, edit in change.items()}
        save_specforge(tmp_path / "data", number, sample)
    with pytest.raises(ConfigError, match=line) as caught:
        imported(tmp_path / "run", target, SpecForgeData(tmp_path / "data"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/train").exists()


def test_mask_tokens_in_the_samples_are_counted(tmp_path: Path, target: Path) -> None:
    model = load_target(target)
    for number, (ids, mask) in zip(range(3), documents(), strict=False):
        if number == 1:
            ids = torch.full_like(ids, 257)
        save_specforge(tmp_path / "data", number, specforge_sample(model, ids, mask, TAPS))
    with pytest.raises(ConfigError, match="mask token 257 occurs 19 times"):
        imported(tmp_path / "run", target, SpecForgeData(tmp_path / "data"))


def test_final_states_that_the_files_lack_are_refused_at_once(tmp_path: Path, target: Path) -> None:
    ids, mask = next(documents())
    save_specforge(tmp_path / "data", 0, specforge_sample(load_target(target), ids, mask, TAPS))
    with pytest.raises(ConfigError, match=r"data_0.ckpt holds no final hidden states; import"):
        imported(tmp_path / "run", target, SpecForgeData(tmp_path / "data"), final_hidden=True)
    assert not (tmp_path / "run").exists()


def test_an_import_that_broke_off_goes_on_and_ends_the_same(
    tmp_path: Path, target: Path, specforge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"final_hidden": True, "max_shard_bytes": 40_000}
    imported(tmp_path / "whole", target, SpecForgeData(specforge), **options)
    read, units = OfflineStates.read, []

    def broken(self: OfflineStates, store: str, documents: range, *rest: Any) -> Any:
        units.append((store, documents))
        if len(units) == 4:
            raise KeyboardInterrupt
        return read(self, store, documents, *rest)

    monkeypatch.setattr(OfflineStates, "read", broken)
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path / "run", target, SpecForgeData(specforge), **options)
    assert not (tmp_path / "run/train").exists()
    first = list(units)
    imported(tmp_path / "run", target, SpecForgeData(specforge), **options)
    assert len(first) == 4
    assert units[4] == first[3]
    assert len(set(units)) == len(units) - 1
    assert tree(tmp_path / "run") == tree(tmp_path / "whole")


def test_other_files_make_it_another_command(tmp_path: Path, target: Path, specforge: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(specforge, data)
    imported(tmp_path / "run", target, SpecForgeData(data))
    (data / "rows_0-2000/data_1.ckpt").unlink()
    with pytest.raises(ConfigError, match="data files"):
        imported(tmp_path / "run", target, SpecForgeData(data))


@pytest.mark.parametrize(
    ("mask", "prompt_tokens"),
    [
        ([0, 0, 0, 1, 1, 1], 3),
        ([0, 1, 1, 0, 0, 1], 5),
        ([1, 1, 1, 1, 1, 1], 3),
        ([1, 1, 0, 0, 1, 1], 4),
        ([0, 0, 0, 0, 0, 0], 3),
        ([1] * 100, 32),
    ],
)
def test_a_prompt_ends_before_the_last_supervised_span(mask: list[int], prompt_tokens: int) -> None:
    assert _prompt_tokens(torch.tensor(mask, dtype=torch.bool)) == prompt_tokens
