"""Real Megatron checkpoints of a tensor-parallel drafter, exported in one plain process."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate import DraftModel
from megatron_splitkv.export import export_drafter, from_zlab, read_drafter
from megatron_splitkv.export.checkpoint import find_iteration, read_model_tensors
from megatron_splitkv.export.zlab import megatron_shapes
from megatron_splitkv.testing import gloo_pool
from tests.drafter.harness import TINY, frozen_target
from tests.export.megatron_checkpoint import (
    ANCHORS,
    draft_sample,
    save_checkpoints,
    write_tracker,
)

Saved = tuple[Path, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A --save folder: iteration 3 stacked, iteration 10 by number, both of the same drafter."""
    root = tmp_path_factory.mktemp("save")
    folders = [root / "iter_0000003", root / "iter_0000010"]
    for folder in folders:
        folder.mkdir()
    hidden = gloo_pool(2).run(save_checkpoints, *map(str, folders), 2)[0]
    TINY.save(root / "drafter_config.json")
    write_tracker(root, "10")
    return root, hidden


def test_layers_come_by_number_however_they_are_stored(saved: Saved) -> None:
    root, _ = saved
    stacked = read_model_tensors(find_iteration(root, 3))
    numbered = read_model_tensors(find_iteration(root))
    assert {name: tuple(t.shape) for name, t in stacked.items()} == megatron_shapes(TINY)
    assert stacked.keys() == numbered.keys()
    assert all(torch.equal(stacked[name], numbered[name]) for name in stacked)
    layers = [stacked[f"decoder.layers.{i}.mlp.linear_fc2.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_exported_drafter_drafts_what_the_megatron_model_drafts(
    saved: Saved, tmp_path: Path
) -> None:
    root, hidden = saved
    export_drafter(root, tmp_path / "drafter")
    ours = DraftModel.from_tensors(*read_drafter(tmp_path / "drafter"))
    sample = draft_sample()
    expected = hidden.view(len(ANCHORS), TINY.block_size, -1)
    embedding, _ = frozen_target()
    cache = ours.new_cache(32)
    for block, anchor in enumerate(ANCHORS):
        ours.extend_context(sample.features[cache.length : anchor], cache)
        tokens = [int(sample.pack.token_ids[anchor])] + [TINY.mask_token_id] * 3
        drafted = ours.draft(embedding[torch.tensor(tokens)], cache)
        error = (drafted - expected[block]).abs().max() / expected[block].abs().max()
        assert error < 1e-5, f"block {block}: {error}"


def test_export_and_its_inverse_are_byte_identical(saved: Saved, tmp_path: Path) -> None:
    root, _ = saved
    export_drafter(root, tmp_path / "drafter", iteration=3)
    config, tensors = read_drafter(tmp_path / "drafter")
    original = read_model_tensors(find_iteration(root, 3))
    returned = from_zlab(tensors, config)
    assert returned.keys() == original.keys()
    assert all(torch.equal(returned[name], original[name]) for name in original)


def test_a7_exported_proposal_length_is_block_size_minus_one(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TINY has B = 4: an engine that takes our files proposes three tokens a step."""
    root, _ = saved
    output = tmp_path / "drafter"
    assert main(["export", "--checkpoint", str(root), "--output", str(output), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_speculative_tokens"] == 3
    assert facts["parameters"] == TINY.num_parameters()
    client = pytest.importorskip("dflash.model")
    drafter = client.DFlashDraftModel.from_pretrained(output)
    assert drafter.block_size - 1 == 3


def test_export_casts_on_request(saved: Saved, tmp_path: Path) -> None:
    root, _ = saved
    export_drafter(root, tmp_path / "drafter", dtype=torch.bfloat16)
    _, tensors = read_drafter(tmp_path / "drafter")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "drafter/config.json").read_text())["dtype"] == "bfloat16"


def test_reading_needs_neither_megatron_nor_a_process_group(saved: Saved, tmp_path: Path) -> None:
    root, _ = saved
    program = (
        "import sys; from megatron_splitkv.export import export_drafter\n"
        f"export_drafter({str(root)!r}, {str(tmp_path / 'drafter')!r})\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'megatron']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_another_drafters_configuration_is_refused(saved: Saved, tmp_path: Path) -> None:
    root, _ = saved
    folder = tmp_path / "save"
    folder.mkdir()
    (folder / "iter_0000010").symlink_to(root / "iter_0000010")
    write_tracker(folder, "10")
    with pytest.raises(ConfigError, match=r"no drafter_config\.json"):
        export_drafter(folder, tmp_path / "drafter")
    for change, message in (
        ({"num_layers": 3}, r"lacks decoder\.layers\.2\.input_layernorm\.weight"),
        ({"num_layers": 1}, r"holds decoder\.layers\.1\.input_layernorm\.weight"),
        ({"ffn_hidden_size": 64}, r"linear_fc\d\.weight of shape .* asks for"),
    ):
        values = json.loads(TINY.to_json()) | {"layer_types": []} | change
        (folder / "drafter_config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=message):
            export_drafter(folder, tmp_path / "drafter")
        assert not (tmp_path / "drafter").exists()


def test_iterations_are_found_or_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    root, _ = saved
    assert find_iteration(root).name == "iter_0000010"
    with pytest.raises(ConfigError, match="no iteration 4; it has 3, 10"):
        find_iteration(root, 4)
    with pytest.raises(ConfigError, match="does not exist"):
        find_iteration(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no latest_checkpointed_iteration\.txt"):
        find_iteration(root / "iter_0000003")
    write_tracker(tmp_path, "release")
    with pytest.raises(ConfigError, match="'release', not an iteration"):
        find_iteration(tmp_path)
    write_tracker(tmp_path, "7")
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(ConfigError, match="no torch_dist checkpoint"):
        find_iteration(tmp_path)


def test_a_damaged_data_file_is_refused(saved: Saved, tmp_path: Path) -> None:
    source = find_iteration(saved[0], 3)
    for file in source.iterdir():
        content = file.read_bytes()
        if file.name == "__1_0.distcp":
            content = content[: len(content) // 2]
        (tmp_path / file.name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"checkpoint {tmp_path} is damaged"):
        read_model_tensors(tmp_path)
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(ConfigError, match="is damaged"):
        read_model_tensors(tmp_path)


class _Touch:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    trace = tmp_path / "was_here"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Touch(trace)))
    with pytest.raises(ConfigError, match="is unreadable: it names"):
        read_model_tensors(tmp_path)
    assert not trace.exists()
    (tmp_path / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match="is unreadable"):
        read_model_tensors(tmp_path)
