"""The recipes' configurations: what they are, their way through YAML, what they refuse."""

import json
from typing import Any

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.recipes import RECIPES, load_recipe
from tests.recipes.environment import needs_bridge, run_python

REFUSED: dict[str, tuple[list[str], str]] = {
    "no store": (["dataset.feature_store=null"], "dataset.feature_store is missing"),
    "strategy": (["dataset.plan_strategy=best"], "dataset.plan_strategy 'best' is not known"),
    "kernel": (["model.attention_kernel=fast"], "attention_kernel 'fast' is not known"),
    "gather": (["model.splitkv_gather=k"], "--splitkv-gather 'k' is not known"),
    "anchors": (["dataset.num_anchors=0"], "dataset.num_anchors 0 is too small"),
    "micro batch": (["train.micro_batch_size=2"], "train.micro_batch_size 2 is not supported"),
    "target": (["dataset.target_id=other"], "features of target 'synthetic', dataset.target_id"),
    "width": (["model.transformer.hidden_size=64"], "model.hidden_size is 64"),
    "taps": (["model.target_layer_ids=[0,3]"], "model.target_layer_ids is (0, 3)"),
    "mask": (["model.mask_token_id=62"], "mask token 62 is the end-of-sequence token"),
    "pack": (["model.seq_length=48"], "document 0 has 70 tokens, more than"),
    "ranks": (["model.transformer.context_parallel_size=2"], "1 ranks cannot be split"),
    "heads": (["model.transformer.num_query_groups=3"], "4 attention heads cannot share 3"),
    "norm": (["model.transformer.normalization=LayerNorm"], "normalization is 'LayerNorm'"),
    "format": (["checkpoint.ckpt_format=fsdp_dtensor"], "checkpoint.ckpt_format 'fsdp_dtensor'"),
    "frozen": (
        ["dataset.feature_store={folder}/damaged", "dataset.verify_feature_store=size"],
        "target_frozen.safetensors is corrupted",
    ),
    "field": (["dataset.online_targt=x"], "the recipe cannot be changed so: "),
    "backend": (
        ["dataset.online_target={folder}/target", "dataset.online_target_backend=jax"],
        "dataset.online_target_backend 'jax' is not known; choose one of: hf, megatron",
    ),
    "backend alone": (
        ["dataset.online_target_backend=hf"],
        "dataset.online_target_backend is for a target in the job: add dataset.online_target",
    ),
    "no target": (["dataset.online_target=/nowhere"], "dataset.online_target /nowhere: there is"),
    "other target": (
        ["dataset.online_target={folder}/target"],
        "is another target (checksum ",
    ),
    "tokens alone": (
        ["dataset.feature_store={folder}/tokens-train"],
        "tokens-train is a token store, it holds no features",
    ),
    "tokens to validate": (
        ["dataset.valid_feature_store={folder}/tokens-valid"],
        "tokens-valid is a token store, it holds no features",
    ),
    "evaluation": (
        ["dist.eval_context_parallel_size=2"],
        "dist.eval_context_parallel_size 2 is not supported",
    ),
    "by Bridge": (["scheduler.lr_warmup_iters=3"], "Megatron-Bridge refuses the configuration"),
}


def test_a_missing_bridge_and_an_unknown_recipe_are_named() -> None:
    with pytest.raises(ConfigError, match="recipe 'llama' is not known; choose one of: qwen3-8b"):
        load_recipe("llama")
    hidden = "import sys; sys.modules['megatron.bridge'] = None\n"
    load = "from megatron_splitkv.recipes import load_recipe\nload_recipe('qwen3-8b')\n"
    process = run_python("-c", hidden + load)
    assert "ConfigError: Megatron-Bridge cannot be imported" in process.stderr
    assert "megatron-splitkv[nemo]" in process.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("configs")
    changes = json.dumps({name: change for name, (change, _) in REFUSED.items()})
    process = run_python("-m", "tests.recipes.config_job", str(folder), changes)
    assert process.returncode == 0, process.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@needs_bridge
@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("qwen3-8b", 1_048_626_432),
        ("qwen3.5-35b-a3b", 473_995_264),
        ("qwen3.5-27b", 1_730_213_120),
        ("qwen3.6-27b", 1_730_213_120),
    ],
)
def test_a_recipe_is_the_published_drafter_and_survives_yaml(
    found: dict[str, Any], target: str, parameters: int
) -> None:
    assert set(found["recipes"]) == set(RECIPES)
    recipe = found["recipes"][target]
    assert recipe.pop("parameters") == parameters
    assert recipe.pop("context_parallel_size") == 8
    assert recipe.pop("cp_comm_type") == "splitkv"
    assert recipe.pop("config_class") == "DFlashConfigContainer"
    assert recipe.pop("refused_by_bridge") == ""
    assert recipe
    assert [name for name, holds in recipe.items() if holds is not True] == []


@needs_bridge
def test_a_good_launch_is_completed(found: dict[str, Any]) -> None:
    assert found["accepted"] == {
        "eval_iters": 1,  # one pass: two packs
        "drafter_config": "synthetic",
        "train": 8,
        "first_item": "block_keep_mask",
        "valid_repeats": True,
        "test": None,
    }


@needs_bridge
@pytest.mark.parametrize("name", REFUSED)
def test_bad_configurations_are_refused_before_anything_starts(
    found: dict[str, Any], name: str
) -> None:
    error = found["refused"][name]
    assert error.startswith("ConfigError: ")
    assert REFUSED[name][1] in error
    assert "\n" not in error


@needs_bridge
def test_nothing_is_checked_by_a_collective(found: dict[str, Any]) -> None:
    assert found["groups"] is False


@needs_bridge
def test_a_target_in_the_job_is_opened_for_the_drafters_own_layers(found: dict[str, Any]) -> None:
    online = found["online"]
    assert online["fields"] == ["T", "megatron"]
    assert online["unknown argument"].startswith("TypeError: ")
    assert online["backend"] == "hf"
    assert online["features"] == [7, 3 * 32]  # not the two layers of the other stores
    assert online["final_hidden"] is None
    assert online["online"] == [True, True]
    assert online["with features"] is None


@needs_bridge
def test_packs_are_dealt_to_replicas_from_where_a_run_goes_on(found: dict[str, Any]) -> None:
    dealt = found["dealt"]
    costs = np.array(dealt["costs"])
    replicas = np.array(dealt["replicas"]).reshape(2, 3, 4)
    canonical = np.arange(4, 28).reshape(3, 4, 2).transpose(2, 0, 1)
    for step in range(3):  # the packs of a step are those that it would have seen
        assert sorted(replicas[:, step].reshape(-1)) == sorted(canonical[:, step].reshape(-1))
    busiest, before = (costs[items].sum(-1).max(0) for items in (replicas, canonical))
    assert (busiest <= before).all()
    assert busiest.sum() < 0.95 * before.sum()
    assert dealt["varying"] is False  # a batch that grows
    # As Bridge's sampler of held-out packs begins; 8 packs an evaluation.
    assert dealt["valid, skip_train false"] == [6, 8]
    assert dealt["valid, skip_train true"] == [0, 8]


@needs_bridge
def test_a_script_that_does_not_tell_where_a_run_goes_on_is_refused(found: dict[str, Any]) -> None:
    assert found["dealt"]["not told"] == (
        "ConfigError: packs cannot be dealt to 2 data-parallel replicas: nobody said where the run "
        "goes on; call Bridge's pretrain(config, BridgeForwardStep(), callbacks=[DealPacks()])"
    )
