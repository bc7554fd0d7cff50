"""Training from a released drafter: what the folder decides, what it contradicts, what it loads."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_splitkv.config import ConfigError
from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.export import from_zlab, write_drafter
from megatron_splitkv.train.initial_drafter import tp_part
from megatron_splitkv.train.setup import TrainingSetup, prepare_training
from tests.export.variants import assert_same_bytes, random_tensors
from tests.train.launches import HIDDEN_SIZE, VOCAB_SIZE, make_store

# Nothing about the drafter: the folder says it all.
LAUNCH = (
    "--calculate-per-token-loss",
    *("--train-iters", "4", "--seq-length", "96", "--num-anchors", "6", "--lr", "1e-2"),
)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return make_store(tmp_path / "store")


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


def _config(store: FeatureStore, **changes: Any) -> DFlashConfig:
    """A drafter of the store's target that differs from every default."""
    target = store.meta.target
    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": HIDDEN_SIZE,
        "ffn_hidden_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "vocab_size": VOCAB_SIZE,
        "num_target_layers": target.num_layers,
        "target_layer_ids": store.meta.target_layer_ids,
        "mask_token_id": target.mask_token_id,
        "block_size": 5,
        "rope_theta": 3e4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 200,
        "eos_token_ids": target.eos_token_ids,
        "pad_token_id": target.pad_token_id,
        "layer_types": ("sliding_attention", "full_attention", "full_attention"),
        "sliding_window": 7,
        "final_logit_softcapping": 9.0,
    }
    return DFlashConfig(**(values | changes))


def _domino(config: DFlashConfig) -> DominoConfig:
    shared = {field.name: getattr(config, field.name) for field in fields(DFlashConfig)}
    return DominoConfig(
        **shared, emb_dim=6, gru_hidden_dim=5, pure_draft_prefix_len=0, shift_label=False
    )


def _prepare(
    monkeypatch: pytest.MonkeyPatch, store: FeatureStore, drafter: Path, *argv: str
) -> TrainingSetup:
    command = ["x", "--feature-store", str(store.path), "--initial-drafter", str(drafter)]
    monkeypatch.setattr("sys.argv", [*command, *LAUNCH, *argv])
    return prepare_training()


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_the_folder_says_which_drafter_it_is(
    monkeypatch: pytest.MonkeyPatch, store: FeatureStore, tmp_path: Path, kind: str
) -> None:
    config = _config(store) if kind == "dflash" else _domino(_config(store))
    tensors = random_tensors(config, torch.bfloat16)
    write_drafter(tmp_path / "drafter", tensors, config)
    # Saying the same again is no contradiction; what only training knows stays free.
    again = ("--num-layers", "3", "--rotary-base", "30000", "--loss-decay-gamma", "3")
    setup = _prepare(monkeypatch, store, tmp_path / "drafter", *again)
    assert setup.dflash == replace(config, loss_decay_gamma=3.0)
    assert setup.args.block_size == setup.dflash.block_size == 5
    assert setup.config.num_layers == 3
    assert setup.initial_weights is not None
    assert_same_bytes(setup.initial_weights, from_zlab(tensors, config))


def test_the_speculators_layout_does_as_well(
    monkeypatch: pytest.MonkeyPatch, store: FeatureStore, tmp_path: Path
) -> None:
    config = _config(store, final_logit_softcapping=None)
    write_drafter(tmp_path / "drafter", random_tensors(config), config, layout="speculators")
    file = tmp_path / "drafter/config.json"
    values = json.loads(file.read_text())
    del values["num_target_layers"]  # as the library leaves it out: the store knows
    file.write_text(json.dumps(values))
    assert _prepare(monkeypatch, store, tmp_path / "drafter").dflash == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "4"], "--num-layers 4 contradicts .*, whose drafter has 3; drop"),
        (["--num-layers=5"], "--num-layers 5 contradicts"),  # even where it is the default
        (["--block-size", "16"], "--block-size 16 contradicts .* has 5"),
        (["--kv-channels", "16"], "--kv-channels 16 contradicts .* has 10"),
        (["--num-query-groups", "6"], "--num-query-groups 6 contradicts .* has 3"),
        (["--drafter", "dspark"], "--drafter dspark contradicts .* has dflash"),
        (
            ["--layer-types", *["full_attention"] * 3],
            "--layer-types full_attention .* has sliding_attention full_attention full",
        ),
        (["--sliding-window", "9"], "--sliding-window 9 contradicts .* has 7"),
        (["--markov-rank", "9"], "--markov-rank is of dspark drafters, --drafter is dflash"),
        (["--rotary-base", "10000"], "--rotary-base 10000 contradicts .* has 30000"),
    ],
)
def test_contradictions_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    store: FeatureStore,
    tmp_path: Path,
    argv: list[str],
    message: str,
) -> None:
    config = _config(store)
    write_drafter(tmp_path / "drafter", random_tensors(config), config)
    with pytest.raises(ConfigError, match=message) as error:
        _prepare(monkeypatch, store, tmp_path / "drafter", *argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": VOCAB_SIZE + 1}, "its vocabulary 65, the store's 64"),
        ({"hidden_size": 64}, "its hidden size 64, the store's 32"),
        ({"num_target_layers": 50}, "its number of target layers 50"),
        ({"target_layer_ids": (0,)}, r"its tapped layers \[0\], the store's \["),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    store: FeatureStore,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    config = _config(store, **change)
    write_drafter(tmp_path / "drafter", random_tensors(config), config)
    with pytest.raises(ConfigError, match=message):
        _prepare(monkeypatch, store, tmp_path / "drafter", "--save", str(tmp_path / "save"))
    assert not (tmp_path / "save").exists()


def test_a_head_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: FeatureStore, tmp_path: Path
) -> None:
    config = _config(store)
    tensors = random_tensors(config, torch.bfloat16)
    write_drafter(tmp_path / "drafter", tensors, config)
    file = tmp_path / "drafter/model.safetensors"
    _, head = store.frozen()
    save_file(load_file(file) | {"lm_head.weight": head.bfloat16()}, file)
    setup = _prepare(monkeypatch, store, tmp_path / "drafter")
    assert setup.initial_weights is not None
    save_file(load_file(file) | {"lm_head.weight": head.bfloat16() + 1}, file)
    with pytest.raises(ConfigError, match=r"brings a tensor lm_head\.weight that is not the"):
        _prepare(monkeypatch, store, tmp_path / "drafter")


def test_a_resumed_run_keeps_its_checkpoints_weights(
    monkeypatch: pytest.MonkeyPatch,
    store: FeatureStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = _config(store)
    write_drafter(tmp_path / "drafter", random_tensors(config), config)
    save = tmp_path / "save"
    options = ("--save", str(save), "--load", str(save))
    setup = _prepare(monkeypatch, store, tmp_path / "drafter", *options)
    assert setup.initial_weights is not None  # nothing to resume yet
    assert f"weights to start from: --initial-drafter {tmp_path}" in capsys.readouterr().out
    monkeypatch.setattr("megatron_splitkv.train.setup.check_resumable", lambda _: None)
    (save / "latest_checkpointed_iteration.txt").write_text("4")
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import unset_global_variables

    unset_global_variables()
    unset_num_microbatches_calculator()
    setup = _prepare(monkeypatch, store, tmp_path / "drafter", *options)
    assert setup.dflash == config
    assert setup.initial_weights is None
    assert f"weights to start from: --load {save}, not" in capsys.readouterr().out


def test_a_missing_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, store: FeatureStore, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read") as error:
        _prepare(monkeypatch, store, tmp_path / "nowhere")
    assert "\n" not in str(error.value)


def test_parts_of_ranks_are_the_whole() -> None:
    """Rows that do not divide, halves of a fused matrix, columns."""
    whole = torch.arange(61.0 * 4).view(61, 4)

    def parameter(axis: int, stride: int = 1) -> nn.Parameter:
        made = nn.Parameter(torch.empty(0))
        for name, value in (
            ("tensor_model_parallel", True),
            ("partition_dim", axis),
            ("partition_stride", stride),
        ):
            setattr(made, name, value)
        return made

    parts = [tp_part(whole, parameter(0), rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [15, 15, 15, 16]
    assert torch.equal(torch.cat(parts), whole)
    columns = [tp_part(whole, parameter(1), rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(columns, dim=1), whole)
    fused = whole[:8]
    part = tp_part(fused, parameter(0, stride=2), 1, 2)
    assert part[:, 0].tolist() == [8, 12, 24, 28]  # rows 2, 3 of gate, then of up
    assert tp_part(whole, nn.Parameter(torch.empty(0)), 1, 2) is whole
