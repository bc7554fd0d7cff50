"""The recipes' configurations: what they are, their way through YAML, what they refuse."""

import json
from typing import Any

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
