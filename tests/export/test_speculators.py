"""The speculators layout: by its recorded contract, and by the library's loader and converter."""

import sys
import types
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export import read_drafter, write_drafter
from megatron_splitkv.export.speculators_json import from_speculators_json, to_speculators_json
from tests.evaluate.models import DRAFTER, tiny_target
from tests.export.variants import (
    DOMINO,
    DSPARK,
    PLAIN,
    SLIDING,
    VARIANTS,
    assert_same_bytes,
    random_tensors,
)

KNOWN = [name for name in VARIANTS if name.split()[0] in ("dflash", "dspark")]
# For the target of `tests.evaluate`, which the library reads too.
WINDOWED = replace(DRAFTER, layer_types=("sliding_attention", "full_attention"), sliding_window=9)


def test_every_key_of_the_library_is_there() -> None:
    values = to_speculators_json(PLAIN, torch.bfloat16, target="some/model")
    assert values["speculators_model_type"] == "dflash"
    assert values["architectures"] == ["DFlashSpeculator"]
    assert values["speculators_config"] == {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 3,  # B - 1
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "some/model", "architectures": []},
    }
    assert PLAIN.target_layer_ids == (0, 2)
    assert values["aux_hidden_state_layer_ids"] == [1, 3]  # what enters a layer, not what leaves it
    assert values["dtype"] == "bfloat16"
    assert (values["block_size"], values["mask_token_id"]) == (4, 60)
    assert values["draft_vocab_size"] == values["transformer_layer_config"]["vocab_size"] == 61
    assert values["sample_from_anchor"] is values["sliding_window_non_causal"] is False
    assert values["transformer_layer_config"]["model_type"] == "qwen3"
    assert values["transformer_layer_config"]["num_hidden_layers"] == 2


def test_dspark_proposes_from_the_anchor() -> None:
    values = to_speculators_json(DSPARK, torch.float32, target=None)
    assert values["speculators_model_type"] == "dspark"
    assert values["sample_from_anchor"] is True
    [method] = values["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == DSPARK.block_size
    assert (values["markov_rank"], values["markov_head_type"]) == (6, "vanilla")
    assert values["enable_confidence_head"] is values["confidence_head_with_markov"] is True


@pytest.mark.parametrize("name", KNOWN)
def test_a_folder_comes_back_byte_identical(tmp_path: Path, name: str) -> None:
    config, tensors = VARIANTS[name], random_tensors(VARIANTS[name], torch.bfloat16)
    write_drafter(tmp_path / "drafter", tensors, config, layout="speculators", target="some/model")
    found, returned = read_drafter(tmp_path / "drafter")
    assert found == config
    assert_same_bytes(returned, tensors)


def test_the_targets_depth_is_asked_for_where_nothing_says_it() -> None:
    values = to_speculators_json(PLAIN, torch.float32, target="some/model")
    del values["num_target_layers"]
    with pytest.raises(ConfigError, match="does not say how many layers its target has"):
        from_speculators_json(values)
    assert from_speculators_json(values, num_target_layers=4) == PLAIN


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DOMINO, "has no domino drafters, only dflash, dspark"),
        (replace(SLIDING, final_logit_softcapping=None), "cannot say input_embedding_scale 1.5"),
        (replace(SLIDING, input_embedding_scale=1.0), "cannot say final_logit_softcapping 3.0"),
    ],
)
def test_what_the_layout_cannot_say_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_drafter(tmp_path / "x", random_tensors(config), config, layout="speculators")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported, only False"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal true is not supported"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32, the target's vocabulary has 61"),
        ({"target_hidden_size": 64}, "target_hidden_size 64 is not supported, only 32"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "-1"),
        ({"aux_hidden_state_layer_ids": None}, "lacks 'aux_hidden_state_layer_ids'"),
        ({"transformer_layer_config": None}, "lacks 'transformer_layer_config'"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
            "speculative_tokens is 4, a dflash block of 4 proposes 3",
        ),
    ],
)
def test_other_speculators_are_refused(change: dict[str, Any], message: str) -> None:
    values = to_speculators_json(
        replace(SLIDING, input_embedding_scale=1.0, final_logit_softcapping=None),
        torch.float32,
        target="some/model",
    )
    with pytest.raises(ConfigError, match=message) as error:
        from_speculators_json(values | change)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def speculators() -> Iterator[Any]:
    """The library, without the reader of its training data, which wants an inference engine."""
    pytest.importorskip("loguru").logger.remove()
    name = "speculators.train.data"
    stand_in = types.ModuleType(name)
    setattr(stand_in, "BatchType", dict)  # noqa: B010 (a module has no such field)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, stand_in)
        yield pytest.importorskip("speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators") / "target"
    tiny_target().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark gated", "dspark rnn"])
def test_the_library_loads_and_writes_what_we_write_and_read(
    speculators: Any, target: Path, tmp_path: Path, kind: str
) -> None:
    config = WINDOWED
    if kind != "dflash":
        shared = {field.name: getattr(WINDOWED, field.name) for field in fields(WINDOWED)}
        own = {"loss_decay_gamma": 4.0, "markov_head_type": VARIANTS[kind].markov_head_type}
        config = replace(DSPARK, **(shared | own))
    tensors = random_tensors(config)
    write_drafter(tmp_path / "a", tensors, config, layout="speculators", target=str(target))
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "a"))
    assert model.config.speculators_model_type == config.kind
    assert model.target_layer_ids == [1, 3, 4]
    assert model.block_size == config.block_size
    [method] = model.config.speculators_config.proposal_methods
    assert method.speculative_tokens == config.num_proposals
    assert model.config.speculators_config.verifier.architectures == ["Qwen3ForCausalLM"]
    assert model.sliding_window_indices == [0]
    state = model.state_dict()
    assert_same_bytes({name: state[name] for name in tensors}, tensors)
    embedding = tiny_target().get_input_embeddings().weight
    assert torch.equal(state["embed_tokens.weight"], embedding)  # taken from the target

    model.save_pretrained(str(tmp_path / "b"))
    found, returned = read_drafter(tmp_path / "b")
    assert found == config
    assert_same_bytes(returned, tensors)


def test_the_librarys_converter_takes_our_zlab_folder(
    speculators: Any, target: Path, tmp_path: Path
) -> None:
    from speculators.convert.dflash.converter import DFlashConverter

    tensors = random_tensors(WINDOWED)
    write_drafter(tmp_path / "zlab", tensors, WINDOWED)
    DFlashConverter().convert(
        str(tmp_path / "zlab"), str(tmp_path / "theirs"), base_model=str(target)
    )
    found, returned = read_drafter(tmp_path / "theirs")
    assert found == WINDOWED
    assert_same_bytes(returned, tensors)
