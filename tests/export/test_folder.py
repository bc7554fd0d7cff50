"""The exported folder is whole or absent."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export import folder as folder_module
from megatron_splitkv.export import read_drafter, write_drafter
from megatron_splitkv.export.config_json import to_config_json
from tests.evaluate.models import DRAFTER, random_zlab_tensors
from tests.export.variants import PLAIN, VARIANTS, assert_same_bytes, random_tensors


def test_what_was_written_is_read(tmp_path: Path) -> None:
    tensors = random_zlab_tensors()
    write_drafter(tmp_path / "drafter", tensors, DRAFTER)
    config, found = read_drafter(tmp_path / "drafter")
    assert config == DRAFTER
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert {p.name for p in (tmp_path / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
        "SERVING.md",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_comes_back_byte_identical(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    config, tensors = VARIANTS[name], random_tensors(VARIANTS[name], dtype)
    write_drafter(tmp_path / "drafter", tensors, config)
    found, returned = read_drafter(tmp_path / "drafter")
    assert found == config
    assert_same_bytes(returned, tensors)
    declared = json.loads((tmp_path / "drafter/config.json").read_text())["dtype"]
    assert f"torch.{declared}" == str(dtype)
    # Again, into each other's place: an exported folder may be replaced.
    write_drafter(tmp_path / "drafter", returned, found)
    assert_same_bytes(read_drafter(tmp_path / "drafter")[1], tensors)


def _shard(folder: Path) -> dict[str, str]:
    """Take a folder's weights apart into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    places = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def test_several_files_with_an_index_are_read(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    write_drafter(tmp_path / "drafter", tensors, PLAIN)
    places = _shard(tmp_path / "drafter")
    assert_same_bytes(read_drafter(tmp_path / "drafter")[1], tensors)
    index = tmp_path / "drafter/model.safetensors.index.json"
    elsewhere = places | {"fc.weight": "../model.safetensors"}
    for content, message in (
        ({"weight_map": elsewhere}, "names '../model.safetensors', which is no file beside it"),
        ({"weight_map": places | {"more.weight": places["fc.weight"]}}, "disagree about more"),
        ({"weight_map": {k: v for k, v in places.items() if k[0] != "f"}}, "disagree about fc"),
        ({"weight_map": 3}, "has no weight_map"),
        ({"weight_map": places | {"more": "x.safetensors"}}, "cannot be read"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message) as error:
            read_drafter(tmp_path / "drafter")
        assert "\n" not in str(error.value)


def _write_raw(folder: Path, tensors: dict[str, torch.Tensor], **values: object) -> None:
    """A folder as a careless exporter would leave it."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = to_config_json(PLAIN, torch.float32) | values
    (folder / "config.json").write_text(json.dumps(config))


def test_copies_of_the_targets_vocabulary_are_left_out(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    whole = torch.zeros(PLAIN.vocab_size, PLAIN.hidden_size)
    copies = {"embed_tokens.weight": whole, "lm_head.weight": whole + 1}
    buffers = {"rotary_emb.inv_freq": torch.ones(4)}
    _write_raw(tmp_path / "drafter", tensors | copies | buffers)
    assert_same_bytes(read_drafter(tmp_path / "drafter")[1], tensors)
    for name in copies:
        _write_raw(tmp_path / "drafter", tensors | {name: torch.zeros(64, PLAIN.hidden_size)})
        with pytest.raises(ConfigError, match=rf"{name} is \(64, 32\), the target's is \(61, 32\)"):
            read_drafter(tmp_path / "drafter")
    _write_raw(tmp_path / "drafter", tensors | {"d2t": torch.zeros(9)})
    with pytest.raises(ConfigError, match="tensor d2t maps a vocabulary of the drafter's own"):
        read_drafter(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("dtypes", "declared", "message"),
    [
        ((torch.float32, torch.float32), "bfloat16", "tensors of float32, .* says bfloat16"),
        ((torch.float32, torch.bfloat16), "float32", "tensors of bfloat16, float32, .* says"),
        ((torch.float32, torch.bfloat16), None, "tensors of bfloat16, float32, .* does not say"),
    ],
)
def test_the_declared_dtype_is_that_of_the_tensors(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], declared: str | None, message: str
) -> None:
    tensors = random_tensors(PLAIN, dtypes[0])
    tensors["fc.weight"] = tensors["fc.weight"].to(dtypes[1])
    _write_raw(tmp_path / "drafter", tensors, dtype=declared)
    with pytest.raises(ConfigError, match=message):
        read_drafter(tmp_path / "drafter")


def test_tied_tensors_are_refused(tmp_path: Path) -> None:
    config = VARIANTS["dspark"]
    tensors = random_tensors(config)
    tied = tensors["markov_head.markov_w1.weight"]
    with pytest.raises(ConfigError, match=r"markov_w1\.weight and .*markov_w2\.weight share"):
        write_drafter(tmp_path / "x", tensors | {"markov_head.markov_w2.weight": tied}, config)
    assert not (tmp_path / "x").exists()


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    q, fc = "layers.0.self_attn.q_proj.weight", "fc.weight"
    tensors[q] = tensors[q].t().contiguous().t()  # strided
    memory = torch.randn(tensors[fc].numel() + tensors["norm.weight"].numel() // 2)
    tensors[fc] = memory[: tensors[fc].numel()].view(tensors[fc].shape)
    tensors["norm.weight"] = memory[-tensors["norm.weight"].numel() :]  # overlapping
    write_drafter(tmp_path / "x", tensors, PLAIN)
    assert_same_bytes(
        read_drafter(tmp_path / "x")[1], {name: t.contiguous() for name, t in tensors.items()}
    )
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        _write_raw(
            tmp_path / "x", {n: t.to(dtype) for n, t in random_tensors(PLAIN).items()}, dtype=None
        )
        with pytest.raises(ConfigError, match=r"weight of (int8|float8_\w+): quantized drafters"):
            read_drafter(tmp_path / "x")


def test_foreign_tensors_are_never_written(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN) | {"module.fc.weight": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"the drafter holds module\.fc\.weight, saved from"):
        write_drafter(tmp_path / "x", tensors, PLAIN)


def test_a_crash_leaves_the_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "drafter"
    write_drafter(target, random_zlab_tensors(seed=1), DRAFTER)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "to_config_json", fail)
        with pytest.raises(OSError, match="disk full"):
            write_drafter(target, random_zlab_tensors(seed=2), DRAFTER)
    assert torch.equal(
        read_drafter(target)[1]["fc.weight"], random_zlab_tensors(seed=1)["fc.weight"]
    )
    write_drafter(target, random_zlab_tensors(seed=3), DRAFTER)
    assert torch.equal(
        read_drafter(target)[1]["fc.weight"], random_zlab_tensors(seed=3)["fc.weight"]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    link = tmp_path / "latest"
    link.symlink_to("c")
    if exists:
        (tmp_path / "c").mkdir()
    # What an interrupted run of another program may leave there.
    (tmp_path / ".c.partial").symlink_to("nowhere")
    for seed in (1, 2):
        write_drafter(link, random_zlab_tensors(seed=seed), DRAFTER)
        assert link.is_symlink()
        expected = random_zlab_tensors(seed=seed)["fc.weight"]
        assert torch.equal(read_drafter(tmp_path / "c")[1]["fc.weight"], expected)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "latest"]


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("x")
    with pytest.raises(ConfigError, match="exists and is no exported drafter"):
        write_drafter(tmp_path / "x", random_zlab_tensors(), DRAFTER)


def test_the_folder_one_is_in_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for seed in (1, 2):
        write_drafter(".", random_zlab_tensors(seed=seed), DRAFTER)
        expected = random_zlab_tensors(seed=seed)["fc.weight"]
        assert torch.equal(read_drafter(".")[1]["fc.weight"], expected)
    with pytest.raises(ConfigError, match="output is empty; name the folder"):
        write_drafter("", random_zlab_tensors(), DRAFTER)


def test_a_crash_in_the_last_step_leaves_no_mixture_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_drafter(tmp_path / "x", random_zlab_tensors(seed=1), DRAFTER)
    replace_file = Path.replace

    def fail_late(self: Path, to: Path) -> Path:
        if self.name == "SERVING.md":
            raise OSError("disk full")
        return replace_file(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail_late)
        with pytest.raises(OSError, match="disk full"):
            write_drafter(tmp_path / "x", random_zlab_tensors(seed=2), DRAFTER)
    assert {p.name for p in tmp_path.iterdir()} == {"x", ".x.old"}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_drafter(tmp_path / "x")
    before = random_zlab_tensors(seed=1)["fc.weight"]
    assert torch.equal(read_drafter(tmp_path / ".x.old")[1]["fc.weight"], before)
    write_drafter(tmp_path / "x", random_zlab_tensors(seed=3), DRAFTER)
    assert read_drafter(tmp_path / "x")[0] == DRAFTER
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is no exported drafter"):
        write_drafter(tmp_path, random_zlab_tensors(), DRAFTER)


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = random_zlab_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16()
    with pytest.raises(ConfigError, match=r"several dtypes \(bfloat16, float32\)"):
        write_drafter(tmp_path / "drafter", tensors, DRAFTER)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_drafter(tmp_path / "nowhere")
    write_drafter(tmp_path / "drafter", random_zlab_tensors(), DRAFTER)
    weights = tmp_path / "drafter/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_drafter(tmp_path / "drafter")
    weights.write_bytes(content)
    config_file = tmp_path / "drafter/config.json"
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(values | {"num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(ConfigError, match=r"holds layers\.1\."):
        read_drafter(tmp_path / "drafter")
