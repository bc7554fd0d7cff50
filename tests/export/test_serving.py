"""The commands beside an exported drafter say what each engine has to be told of each kind."""

import json
import re
from typing import Any

import pytest

from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.export.serving import serving_notes
from tests.export.variants import VARIANTS


def _speculative_config(notes: str) -> dict[str, Any]:
    found = re.search(r"--speculative-config '(.*)'", notes)
    assert found is not None
    values: dict[str, Any] = json.loads(found.group(1))
    return values


@pytest.mark.parametrize(
    ("name", "method", "proposals"),
    [
        ("dflash", "dflash", 3),  # B = 4
        ("sliding", "dflash", 3),
        ("domino", "dflash", 4),  # a label behind its slot: the anchor's slot drafts too
        ("domino unshifted", "dflash", 3),
        ("dspark", "dspark", 4),
    ],
)
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_vllm_is_told_the_method_and_how_many_tokens(
    name: str, method: str, proposals: int, layout: str
) -> None:
    notes = serving_notes(VARIANTS[name], layout, "some/model")
    found = _speculative_config(notes)
    assert found["method"] == method
    assert found["num_speculative_tokens"] == proposals
    assert "vllm serve some/model" in notes
    assert ("sglang.launch_server" in notes) == (layout == "zlab")


def test_sglang_counts_what_is_verified() -> None:
    notes = serving_notes(VARIANTS["dflash"], "zlab")
    assert "--speculative-algorithm DFLASH" in notes
    assert "--speculative-num-draft-tokens 4" in notes  # the anchor and three proposals
    notes = serving_notes(VARIANTS["dspark"], "zlab")
    assert "--speculative-algorithm DSPARK" in notes
    assert "--speculative-dspark-block-size 4" in notes  # four proposals
    assert "--speculative-num-draft-tokens" not in notes
    notes = serving_notes(VARIANTS["domino"], "zlab")
    assert "--speculative-algorithm DFLASH" in notes
    assert "--speculative-num-draft-tokens" not in notes


def test_a_target_with_a_space_is_one_word() -> None:
    notes = serving_notes(VARIANTS["dflash"], "zlab", "my model")
    assert "vllm serve 'my model' " in notes
    assert "--model-path 'my model' " in notes


def test_published_numbers() -> None:
    found = _speculative_config(
        serving_notes(DFlashConfig.preset("qwen3-8b"), "zlab", "Qwen/Qwen3-8B")
    )
    assert found["num_speculative_tokens"] == 15
