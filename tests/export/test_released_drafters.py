"""Released drafters of every kind in Megatron models of several layouts, and back, bit for bit.

The public client runs the same folders: a model that was loaded from one drafts what it drafts.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_splitkv.cli import main
from megatron_splitkv.evaluate.heads import vocabulary_logits
from megatron_splitkv.export import from_zlab, read_drafter, to_zlab, write_drafter
from tests.drafter.harness import frozen_target, on_ranks
from tests.export.megatron_checkpoint import (
    ANCHORS,
    Loaded,
    draft_sample,
    load_released,
    write_tracker,
)
from tests.export.variants import VARIANTS, assert_same_bytes, random_tensors

# Every rank holds part of the weights, or all of them and part of the rows.
LAYOUTS = ((2, 1), (1, 2))
SAVED = ("domino", "dspark")


@dataclass
class Released:
    """Folders of released drafters by name, and what came of loading them."""

    root: Path
    loaded: dict[tuple[str, tuple[int, int]], Loaded]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    """All variants loaded at all layouts; two kinds saved as Megatron checkpoints too."""
    root = tmp_path_factory.mktemp("released")
    for name, config in VARIANTS.items():
        write_drafter(root / name, random_tensors(config), config)
    save = {}
    for name in SAVED:
        (root / f"save {name}" / "iter_0000001").mkdir(parents=True)
        write_tracker(root / f"save {name}", "1")
        VARIANTS[name].save(root / f"save {name}" / "drafter_config.json")
        save[name] = str(root / f"save {name}" / "iter_0000001")
    folders = {name: str(root / name) for name in VARIANTS}
    return Released(root, on_ranks(2, load_released, folders, LAYOUTS, save)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_loaded_weights_are_byte_identical(
    released: Released, name: str, layout: tuple[int, int]
) -> None:
    config, tensors = VARIANTS[name], random_tensors(VARIANTS[name])
    weights = released.loaded[name, layout].weights
    assert_same_bytes(weights, from_zlab(tensors, config))
    assert_same_bytes(to_zlab(weights, config), tensors)


@pytest.mark.parametrize("name", ["dflash", "sliding"])
def test_logits_equal_the_public_clients(released: Released, name: str) -> None:
    client = pytest.importorskip("dflash.model")
    config = VARIANTS[name]
    drafted = released.loaded[name, (2, 1)].drafted.view(len(ANCHORS), config.block_size, -1)
    theirs, info = client.DFlashDraftModel.from_pretrained(
        released.root / name, output_loading_info=True, dtype="auto"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layers = [layer.self_attn for layer in theirs.layers]
    assert [layer.sliding_window for layer in layers] == list(config.windows)
    assert [layer.is_causal for layer in layers] == [w is not None for w in config.windows]
    embedding, head = frozen_target()
    output_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    output_head.weight.data.copy_(head)
    scale = float(client._draft_value(theirs.config, "input_embedding_scale", 1.0))
    sample = draft_sample()
    for block, anchor in enumerate(ANCHORS):
        tokens = [int(sample.pack.token_ids[anchor])] + [config.mask_token_id] * 3
        with torch.inference_mode():
            hidden = theirs(
                target_hidden=sample.features[None, :anchor],
                noise_embedding=embedding[torch.tensor(tokens)][None] * scale,
                position_ids=torch.arange(anchor + config.block_size)[None],
            )[0]
            expected = theirs.compute_logits(hidden, output_head)
        found = vocabulary_logits(config, drafted[block], head)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_each_kind_is_exported_byte_identical(
    released: Released, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "drafter")
    save = str(released.root / f"save {name}")
    assert main(["export", "--checkpoint", save, "--output", output]) == 0
    assert f"({name}, zlab)" in capsys.readouterr().out
    config, tensors = read_drafter(output)
    assert config == VARIANTS[name]
    assert_same_bytes(tensors, random_tensors(VARIANTS[name]))


def test_the_command_exports_both_layouts_and_converts(
    released: Released, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = random_tensors(VARIANTS["dspark"])
    save = str(released.root / "save dspark")
    first, second, third = (str(tmp_path / x) for x in ("first", "second", "third"))
    export = ["export", "--checkpoint", save, "--output", first, "--format", "speculators"]
    assert main([*export, "--target", "some/model"]) == 0
    assert "(dspark, speculators)" in capsys.readouterr().out
    assert "vllm serve some/model" in (tmp_path / "first/SERVING.md").read_text()
    assert main(["export", "--drafter", first, "--output", second]) == 0
    assert main(["export", "--drafter", second, "--output", third, "--dtype", "bfloat16"]) == 0
    assert "4 proposed tokens" in capsys.readouterr().out
    for folder in (first, second):
        assert_same_bytes(read_drafter(folder)[1], tensors)
    _, cast = read_drafter(third)
    assert_same_bytes(cast, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    refused = ["export", "--drafter", first, "--output", third, "--iteration", "3"]
    assert main(refused) == 2
    assert "--iteration is of a --checkpoint" in capsys.readouterr().err
