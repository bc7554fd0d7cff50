"""``--online-target``: what it is checked against, and what it settles about the features."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_splitkv.config import ConfigError
from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.data import target as target_module
from megatron_splitkv.data.frozen import FROZEN_FILE
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE, DFlashConfig
from megatron_splitkv.export import write_drafter
from megatron_splitkv.online.hf_target import HFTarget
from megatron_splitkv.testing import gloo_pool
from megatron_splitkv.train.dataset import split_batch
from megatron_splitkv.train.online_arguments import (
    check_online_choice,
    meta_of_target,
    open_target,
)
from megatron_splitkv.train.providers import DatasetsProvider
from megatron_splitkv.train.setup import TrainingSetup, prepare_training
from tests.drafter.harness import TINY
from tests.export.variants import random_tensors
from tests.online.tiny import save_store, save_target
from tests.train.launches import TINY_DRAFTER


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("online")
    target = save_target(folder / "target")
    save_target(folder / "other", seed=4)
    save_store(folder / "features", target)
    save_store(folder / "tokens", target, tokens_only=True)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def fresh_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's globals of a process that has just started, before and after."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import unset_global_variables

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with cpu_mode():
        yield
    unset_global_variables()
    unset_num_microbatches_calculator()


def _prepare(
    monkeypatch: pytest.MonkeyPatch, store: Path, target: Path | None, *argv: str
) -> TrainingSetup:
    online = () if target is None else ("--online-target", str(target))
    command = ["x", "--feature-store", str(store), "--train-iters", "4", *TINY_DRAFTER]
    monkeypatch.setattr("sys.argv", [*command, *online, *argv])
    return prepare_training()


@pytest.mark.parametrize(
    ("store", "argv", "layers", "dtype"),
    [
        ("features", (), TINY.target_layer_ids, torch.float32),
        ("features", ("--target-layer-ids", "1,3", "--bf16"), (1, 3), torch.float32),
        ("tokens", ("--target-layer-ids", "0,2"), (0, 2), torch.float32),
        ("tokens", ("--bf16",), (2,), torch.bfloat16),  # 4 layers: as prepare would choose
    ],
)
def test_layers_and_dtype_of_the_features(
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, Path],
    store: str,
    argv: tuple[str, ...],
    layers: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    valid = ("--valid-feature-store", str(folders["tokens"]))
    setup = _prepare(monkeypatch, folders[store], folders["target"], *valid, *argv)
    assert setup.dflash.target_layer_ids == layers
    assert setup.open_target is not None
    target = setup.open_target(None)  # type: ignore[arg-type]
    assert isinstance(target, HFTarget)
    cu_seqlens = np.array([0, 7])
    features, final_hidden = target.states(np.arange(7), cu_seqlens, 0)
    assert final_hidden is None
    assert features.shape == (7, 32 * len(layers))
    assert features.dtype is dtype


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_teacher_needs_no_store_of_final_hidden_states(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], drafter: str
) -> None:
    setup = _prepare(monkeypatch, folders["tokens"], folders["target"], "--drafter", drafter)
    assert setup.open_target is not None
    states = setup.open_target(None).states(  # type: ignore[arg-type]
        np.arange(7), np.array([0, 7]), 0
    )
    assert (states[1] is not None) == (drafter == "dspark")


def test_an_initial_drafter_says_which_layers_it_reads(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = replace(TINY, target_layer_ids=(1, 3))
    write_drafter(tmp_path / "drafter", random_tensors(config, torch.float32), config)
    argv = ("--initial-drafter", str(tmp_path / "drafter"))
    setup = _prepare(monkeypatch, folders["tokens"], folders["target"], *argv)
    assert setup.dflash.target_layer_ids == (1, 3)
    with pytest.raises(ConfigError, match=r"tapped layers \[1, 3\], the store's \[0, 2\]"):
        _prepare(monkeypatch, folders["features"], folders["target"], *argv)


def test_a_megatron_target_waits_for_the_process_groups(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    backend = ("--online-target-backend", "megatron")
    setup = _prepare(monkeypatch, folders["tokens"], folders["target"], *backend)
    assert setup.open_target is not None
    with pytest.raises(ConfigError, match="is another target"):
        _prepare(monkeypatch, folders["tokens"], folders["other"], *backend)
    odd = shutil.copytree(folders["target"], tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(ConfigError, match="mixtral"):
        _prepare(monkeypatch, folders["tokens"], odd, *backend)


def test_items_are_packs_of_which_no_rank_reads_features(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    for name, value in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(
            parallel_state, f"get_context_parallel_{name}", lambda value=value: value
        )
        monkeypatch.setattr(parallel_state, f"get_data_parallel_{name}", lambda value=value: value)
    setup = _prepare(monkeypatch, folders["features"], folders["target"])
    train, _, _ = DatasetsProvider(setup)((4, 0, 0))
    pack, _ = split_batch({name: tensor[None] for name, tensor in train[1].items()})
    assert isinstance(pack, Pack)
    assert setup.store.bytes_read == 0
    ids = train.packing.pack_documents(1)
    assert pack.document_ids.tolist() == ids.tolist()
    assert np.array_equal(
        pack.token_ids, np.concatenate([setup.store.token_ids(int(i)) for i in ids])
    )


def test_bad_targets_are_one_line_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for target, argv, message in (
        (tmp_path / "nowhere", (), "--online-target .*nowhere: there is no such folder"),
        (empty, (), r"is not a Hugging Face folder: it has no config\.json"),
        (folders["other"], (), "other is another target .* than the feature store's .'tiny'"),
        (folders["target"], ("--target-layer-ids", "1,4"), "target layer 4 does not exist"),
        (folders["target"], ("--target-layer-ids", "2,1"), "must ascend without repetition"),
        (folders["target"], ("--online-target-backend", "jax"), "choose one of: hf, megatron"),
        (None, ("--online-target-backend", "hf"), "backend is for a target in the job: add --onl"),
        (None, ("--target-layer-ids", "1"), "--target-layer-ids is for a target in the job"),
        (None, (), "tokens is a token store, it holds no features: .*--online-target"),
    ):
        save = ("--save", str(tmp_path / "checkpoints"))
        with pytest.raises(ConfigError, match=message) as error:
            _prepare(monkeypatch, folders["tokens"], target, *argv, *save)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "checkpoints").exists()


def _opened(target: Path, store: Path, backend: str) -> tuple[int, str]:
    """How often a rank hashed the target's weights, and what it said against it."""
    features = FeatureStore(store)
    hashed = mock.Mock(wraps=target_module.file_sha256)
    with cpu_mode(), mock.patch.object(target_module, "file_sha256", hashed):
        try:
            open_target(
                target,
                backend,
                meta_of_target(features.meta, TINY.target_layer_ids, bf16=False),
                [features],
                final_hidden=False,
                tp_size=1,
                cp_size=1,
                transformer_impl="local",
                gpu=0,
            )
        except ConfigError as error:
            return hashed.call_count, str(error)
    return hashed.call_count, ""


def test_one_rank_hashes_the_target_and_all_refuse_another(folders: dict[str, Path]) -> None:
    for target, backend in (("target", "hf"), ("other", "hf"), ("other", "megatron")):
        ranks = gloo_pool(2).run(_opened, folders[target], folders["tokens"], backend)
        assert sum(hashed for hashed, _ in ranks) == 1
        assert ranks[0][1] == ranks[1][1]
        assert ("is another target" in ranks[0][1]) == (target == "other")


def test_documents_that_rope_forbids_are_refused_before_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["target"], tmp_path / "dynamic")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="'dynamic' depends on what it read before"):
        _prepare(monkeypatch, folders["tokens"], folder)


def test_a_target_without_transformers_is_one_line(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    """Before the weights are read: here another target's."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs transformers; install megatron-splitkv\[target\]"
    ):
        _prepare(monkeypatch, folders["tokens"], folders["other"])


def test_a_store_without_embedding_and_head_is_refused(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    """They are the drafter's, wherever the target runs."""
    store = shutil.copytree(folders["tokens"], tmp_path / "store")
    (store / FROZEN_FILE).unlink()
    with pytest.raises(ConfigError, match=f"{FROZEN_FILE} is missing"):
        _prepare(monkeypatch, store, folders["target"])


def test_checkpoints_with_other_layers_are_refused(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], tmp_path: Path
) -> None:
    argv = ("--save", str(tmp_path / "checkpoints"), "--target-layer-ids")
    _prepare(monkeypatch, folders["tokens"], folders["target"], *argv, "0,2")
    saved = DFlashConfig.load(tmp_path / "checkpoints" / DRAFTER_CONFIG_FILE)
    assert saved.target_layer_ids == (0, 2)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigError, match="target_layer_ids"):
        _prepare(monkeypatch, folders["tokens"], folders["target"], *argv, "1,2")


def test_a_launcher_with_names_of_its_own_sees_them() -> None:
    names = ("dataset.target", "dataset.backend")
    assert check_online_choice("folder", None, *names) == "hf"
    assert check_online_choice("folder", "megatron", *names) == "megatron"
    assert check_online_choice(None, None, *names) is None
    for folder, backend, message in (
        (None, "hf", r"dataset\.backend is for a target in the job: add dataset\.target FOLDER"),
        ("folder", "jax", r"dataset\.backend 'jax' is not known; choose one of: hf, megatron"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_online_choice(folder, backend, *names)
