"""Final hidden states: beside the features where they are asked for, nowhere else."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.packing import final_hidden_reader, read_pack
from megatron_splitkv.data.shard import seal_index
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.target_states import check_final_hidden, document_states
from megatron_splitkv.testing.synthetic import make_synthetic_store

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=6, hidden_size=4, vocab_size=32, mask_token_id=31
)
LENGTHS = [7, 5, 40]


def _counting(start: int, rows: int, width: int) -> torch.Tensor:
    return torch.arange(start, start + rows * width, dtype=torch.float32).view(rows, width)


def _write(path: Path, *, final_hidden: bool, dtype: str = "float32") -> Path:
    meta = StoreMeta(TARGET, (1, 3), dtype, final_hidden)
    with FeatureStoreWriter(path, meta, max_shard_bytes=700) as writer:
        for n in LENGTHS:
            rows = (torch.arange(n) % 30, torch.arange(n) > 2, _counting(n, n, 8))
            writer.add_document(*rows, _counting(1000 * n, n, 4) if final_hidden else None)
    return path


def test_a_store_without_them_has_the_bytes_that_it_always_had(tmp_path: Path) -> None:
    """The seals cover the shards' checksums, and are those of the version before."""
    for dtype, seal in (("float32", SEAL_FLOAT32), ("bfloat16", SEAL_BFLOAT16)):
        path = _write(tmp_path / dtype, final_hidden=False, dtype=dtype)
        index = json.loads((path / "index.json").read_text())
        assert index["schema_version"] == 1
        assert "final_hidden" not in index
        assert index["sha256"] == seal


SEAL_FLOAT32 = "56caf0be11b2491a8bed08b13063dd38eea02d8b34c24b050ac9301e39ac3405"
SEAL_BFLOAT16 = "5d7642aa2248f8942625e91930fc24d25a9930e191b7bd1cdb9c9650e4fd58dc"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_over_several_shards(tmp_path: Path, dtype: str) -> None:
    path = _write(tmp_path / "s", final_hidden=True, dtype=dtype)
    store = FeatureStore(path, verify="full")
    assert len(list(path.glob("shard-*"))) >= 2
    assert store.meta.final_hidden
    for i, n in enumerate(LENGTHS):
        expected = _counting(1000 * n, n, 4).to(store.feature_dtype)
        assert torch.equal(store.read_final_hidden(i, 0, n), expected)
        assert torch.equal(store.read_final_hidden(i, 2, n - 1), expected[2 : n - 1])
        assert torch.equal(store.read_features(i, 0, n), _counting(n, n, 8).to(store.feature_dtype))
        assert store.loss_mask(i).tolist() == [k > 2 for k in range(n)]
        assert store.token_ids(i).tolist() == [k % 30 for k in range(n)]
    with safe_open(path / "shard-00000.safetensors", "pt") as shard:
        assert shard.get_tensor("final_hidden").shape[1] == 4
        assert torch.equal(shard.get_slice("final_hidden")[0:7], store.read_final_hidden(0, 0, 7))


def test_only_the_asked_rows_are_counted_and_bad_rows_refused(tmp_path: Path) -> None:
    store = FeatureStore(_write(tmp_path / "s", final_hidden=True))
    store.read_final_hidden(2, 10, 13)
    assert store.bytes_read == 3 * 4 * 4
    store.read_final_hidden(2, 5, 5)
    assert store.bytes_read == 3 * 4 * 4
    for start, stop in ((-1, 2), (39, 41)):
        with pytest.raises(IndexError, match="document 2 with 40 rows"):
            store.read_final_hidden(2, start, stop)


def test_a_store_without_them_says_so(tmp_path: Path) -> None:
    store = FeatureStore(_write(tmp_path / "s", final_hidden=False))
    message = r"holds no final hidden states .* prepare --final-hidden"
    with pytest.raises(ConfigError, match=message):
        store.read_final_hidden(0, 0, 1)
    with pytest.raises(ConfigError, match=message):
        final_hidden_reader(store, read_pack(store, np.array([0])))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_document_must_carry_what_its_store_holds(tmp_path: Path, wanted: bool) -> None:
    rows = (torch.arange(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, 8))
    bad = [None, torch.zeros(2, 4), torch.zeros(3, 5)] if wanted else [torch.zeros(3, 4)]
    writer = FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3), final_hidden=wanted))
    for final_hidden in bad:
        with pytest.raises(ConfigError, match="document 0 with 3 tokens needs final hidden states"):
            writer.add_document(*rows, final_hidden)


def test_a_cut_or_damaged_file_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "s", final_hidden=True)
    store = FeatureStore(path)
    shard = path / "shard-00000.safetensors"
    content = shard.read_bytes()
    place = content.index(store.read_final_hidden(0, 6, 7).numpy().tobytes())

    shard.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    FeatureStore(path, verify="size")
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors is corrupted: checksum"):
        FeatureStore(path, verify="full")

    os.truncate(shard, place)
    with pytest.raises(ConfigError, match=rf"has {place} bytes, expected {len(content)}"):
        FeatureStore(path)
    with pytest.raises(ConfigError, match="the shard is truncated"):
        store.read_final_hidden(0, 6, 7)


def test_an_index_that_lies_about_them_does_not_fit_its_shards(tmp_path: Path) -> None:
    for truth in (True, False):
        path = _write(tmp_path / str(truth), final_hidden=truth)
        index = json.loads((path / "index.json").read_text()) | {"final_hidden": not truth}
        (path / "index.json").write_text(json.dumps(seal_index(index)))
        with pytest.raises(ConfigError, match=r"rows of \d+ bytes make \d+ bytes, the index says"):
            FeatureStore(path)


def test_a_version_newer_than_the_reader_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "s", final_hidden=True)
    index = json.loads((path / "index.json").read_text())
    assert index["schema_version"] == 2
    for version in (4, 0, [1], "2", None):
        (path / "index.json").write_text(json.dumps(index | {"schema_version": version}))
        with pytest.raises(ConfigError, match="this version reads 1 to 3"):
            FeatureStore(path)


def test_the_synthetic_store_is_the_same_beside_them(tmp_path: Path) -> None:
    plain = make_synthetic_store(tmp_path / "plain", [30, 20])
    with_them = make_synthetic_store(tmp_path / "with", [30, 20], final_hidden=True)
    assert torch.equal(plain.read_features(1, 0, 20), with_them.read_features(1, 0, 20))
    assert with_them.read_final_hidden(1, 0, 20).shape == (20, 8)


def _head_inputs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head really reads, and what it says."""
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    hook.remove()
    return seen[0][0], logits


def test_they_are_what_the_head_reads(target_folder: Path) -> None:
    model = load_target(target_folder)
    check_final_hidden(model)
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(256, (n,), generator=generator) for n in (9, 33, 1, 17)]
    pieces = document_states(model, documents, (1, 2))
    states = {piece.document: piece.final_hidden for piece in pieces}
    for i, ids in enumerate(documents):
        read, logits = _head_inputs(model, ids)
        torch.testing.assert_close(states[i], read, rtol=1e-4, atol=1e-4)
        said = model.get_output_embeddings()(states[i])
        torch.testing.assert_close(said, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("factor", "cap"), [(1.0, None), (1.0, 2.0), (0.5, None), (0.5, 2.0)])
def test_a_target_that_changes_its_logits_is_refused(factor: float, cap: float | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.5, final_logit_softcapping=cap,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def change(module: Any, inputs: Any, output: Any) -> Any:
        logits = factor * output.logits
        output.logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return output

    model.register_forward_hook(change)
    if factor == 1.0:
        check_final_hidden(model)
        return
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits"):
        check_final_hidden(model)


def test_prepare_stores_them_on_request(target_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "x.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"a text, number {i}"}) for i in range(4)))
    arguments = ["prepare", "--target", str(target_folder), "--text", str(text)]
    for name, more in (("plain", []), ("with", ["--final-hidden"])):
        assert main([*arguments, "--output", str(tmp_path / name), *more]) == 0
    plain, store = (FeatureStore(tmp_path / name / "train") for name in ("plain", "with"))
    assert not plain.meta.final_hidden
    assert FeatureStore(tmp_path / "with" / "valid").meta.final_hidden
    assert json.loads((tmp_path / "with" / "prepare.json").read_text())["final_hidden"] is True
    model, n = load_target(target_folder), int(store.lengths[0])
    read, _ = _head_inputs(model, torch.from_numpy(store.token_ids(0)))
    torch.testing.assert_close(store.read_final_hidden(0, 0, n), read, rtol=1e-4, atol=1e-4)
    assert torch.equal(plain.read_features(0, 0, n), store.read_features(0, 0, n))
