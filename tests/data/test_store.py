"""The store holds exactly what was added, and says clearly when it does not."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo, default_target_layer_ids
from megatron_splitkv.data.shard import ShardLayout, seal_index
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from megatron_splitkv.testing.synthetic import make_synthetic_store

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=6, hidden_size=4, vocab_size=32, mask_token_id=31
)


def _documents(lengths: list[int], width: int = 8) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(30, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.5,
            torch.randn(n, width, generator=generator),
        )
        for n in lengths
    ]


def _write(path: Path, documents: list[tuple[torch.Tensor, ...]], dtype: str = "float32") -> None:
    with FeatureStoreWriter(path, StoreMeta(TARGET, (1, 3), dtype), max_shard_bytes=600) as writer:
        writer.write_frozen(torch.zeros(32, 4), torch.ones(32, 4))
        for document in documents:
            writer.add_document(*document)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_over_several_shards(tmp_path: Path, dtype: str) -> None:
    documents = _documents([7, 5, 2, 40, 1, 9, 12])
    _write(tmp_path / "s", documents, dtype)
    store = FeatureStore(tmp_path / "s", verify="full")
    assert len(list((tmp_path / "s").glob("shard-*"))) >= 3
    assert store.lengths.tolist() == [7, 5, 2, 40, 1, 9, 12]
    assert store.meta.feature_width == 8
    for i, (token_ids, loss_mask, features) in enumerate(documents):
        np.testing.assert_array_equal(store.token_ids(i), token_ids.numpy())
        np.testing.assert_array_equal(store.loss_mask(i), loss_mask.numpy())
        expected = features.to(store.feature_dtype)
        assert torch.equal(store.read_features(i, 0, len(token_ids)), expected)
        assert torch.equal(store.read_features(i, 1, len(token_ids)), expected[1:])
    embedding, head = store.frozen()
    assert embedding.sum() == 0
    assert head.sum() == 32 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_are_plain_safetensors(tmp_path: Path, dtype: str) -> None:
    documents = _documents([3, 5])
    _write(tmp_path / "s", documents, dtype)
    with safe_open(tmp_path / "s" / "shard-00000.safetensors", "pt") as shard:
        features = torch.cat([d[2] for d in documents]).to(shard.get_tensor("features").dtype)
        assert torch.equal(shard.get_slice("features")[2:7], features[2:7])
        assert torch.equal(
            shard.get_tensor("token_ids"), torch.cat([d[0] for d in documents]).int()
        )
        assert shard.get_tensor("loss_mask").dtype == torch.uint8


def test_only_the_asked_rows_are_counted_and_bad_rows_refused(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [100], hidden_size=8)
    store.token_ids(0)
    assert store.bytes_read == 0
    store.read_features(0, 10, 13)
    assert store.bytes_read == 3 * 16 * 4
    store.read_features(0, 5, 5)
    assert store.bytes_read == 3 * 16 * 4
    for start, stop in ((-1, 2), (99, 101), (4, 3)):
        with pytest.raises(IndexError):
            store.read_features(0, start, stop)
    for document in (-1, 1):
        with pytest.raises(IndexError):
            store.token_ids(document)
        with pytest.raises(IndexError, match=rf"of document {document} .* with 1 documents"):
            store.gather_loss_masks([0, document])


def test_a_crash_at_any_rename_leaves_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = _documents([30, 30, 30])
    replace, renames = os.replace, 0
    _write(tmp_path / "whole", documents)
    total = len(list((tmp_path / "whole").iterdir()))
    assert total == 5  # three shards, embedding and head, index

    for crash_at in range(total):
        renames = 0

        def crash(source: str, target: str, at: int = crash_at) -> None:
            nonlocal renames
            if renames == at:
                raise KeyboardInterrupt
            renames += 1
            replace(source, target)

        path = tmp_path / f"crash-{crash_at}"
        monkeypatch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            _write(path, documents)
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(ConfigError, match="is not a feature store"):
            FeatureStore(path)

        _write(path, documents)
        assert not list(path.glob("*.partial"))
        for file in (tmp_path / "whole").iterdir():
            assert (path / file.name).read_bytes() == file.read_bytes()


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    for name in ("shard-00007.safetensors", "shard-00008.safetensors.partial", "mine.txt"):
        (folder / name).write_bytes(b"half")
    _write(folder, _documents([4]))
    assert {file.name for file in folder.iterdir()} == {
        "index.json",
        "mine.txt",
        "shard-00000.safetensors",
        "target_frozen.safetensors",
    }


def test_an_unfinished_writer_makes_no_store(tmp_path: Path) -> None:
    def write_half() -> None:
        with FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3))) as writer:
            writer.add_document(*_documents([4])[0])
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_half()
    with pytest.raises(ConfigError, match=r"it has no index\.json"):
        FeatureStore(tmp_path / "s")


def test_a_finished_store_is_never_overwritten(tmp_path: Path) -> None:
    make_synthetic_store(tmp_path / "s", [4])
    with pytest.raises(ConfigError, match="already holds a feature store"):
        FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3)))


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "target_frozen.safetensors"])
def test_truncated_file_is_named_with_both_sizes(tmp_path: Path, name: str) -> None:
    make_synthetic_store(tmp_path / "s", [600, 600])
    file = tmp_path / "s" / name
    size = file.stat().st_size
    os.truncate(file, size - 3)
    with pytest.raises(ConfigError, match=rf"{name} has {size - 3} bytes, expected {size}"):
        FeatureStore(tmp_path / "s", verify="size")


def test_file_cut_while_open_is_an_error_not_garbage(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [100])
    os.truncate(tmp_path / "s" / "shard-00000.safetensors", 1000)
    with pytest.raises(ConfigError, match="truncated"):
        store.read_features(0, 90, 100)


def test_reads_that_come_in_pieces_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_synthetic_store(tmp_path / "s", [100])
    whole, ids = store.read_features(0, 0, 100), store.token_ids(0)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, b, at: preadv(handle, [b[0][:1001]], at))
    assert torch.equal(store.read_features(0, 0, 100), whole)
    np.testing.assert_array_equal(store.token_ids(0), ids)
    os.truncate(tmp_path / "s" / "shard-00000.safetensors", 3000)
    with pytest.raises(ConfigError, match=r"ends at byte 3000, expected \d{4,}: the shard"):
        store.read_features(0, 0, 100)


def test_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = _documents([20] * 6)
    _write(tmp_path / "s", documents)
    monkeypatch.setattr("megatron_splitkv.data.store._MAX_OPEN_SHARDS", 2)
    store = FeatureStore(tmp_path / "s")
    assert len(list((tmp_path / "s").glob("shard-*"))) == 6
    before = len(os.listdir("/proc/self/fd"))
    order = [0, 5, 5, 1, 0, 4, 2, 3, 0]
    found = store.gather_features(order, [1] * 9, [19] * 9)
    assert torch.equal(found, torch.cat([documents[i][2][1:19] for i in order]))
    assert store.gather_token_ids(order).tolist() == [
        token for i in order for token in documents[i][0].tolist()
    ]
    assert len(os.listdir("/proc/self/fd")) == before + 2
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_store_moved_while_open_is_one_line(tmp_path: Path) -> None:
    _write(tmp_path / "s", _documents([40, 40, 40]))
    store = FeatureStore(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"shard-00000.safetensors cannot be opened any more"):
        store.token_ids(0)


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "target_frozen.safetensors"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    make_synthetic_store(tmp_path / "s", [50])
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    entry = index["frozen"] if name.startswith("target") else index["shards"][0]
    content = bytearray((tmp_path / "s" / name).read_bytes())
    content[-7] ^= 4
    (tmp_path / "s" / name).write_bytes(content)
    FeatureStore(tmp_path / "s", verify="size")
    with pytest.raises(ConfigError, match=name) as error:
        FeatureStore(tmp_path / "s", verify="full")
    assert f"expected {entry['sha256']}" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_synthetic_store(tmp_path / "s", [50])
    (tmp_path / "s" / "shard-00000.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors is missing"):
        FeatureStore(tmp_path / "s")


def test_other_schema_version_and_broken_index_are_refused(tmp_path: Path) -> None:
    make_synthetic_store(tmp_path / "s", [5])
    file = tmp_path / "s" / "index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "schema_version": 99}))
    with pytest.raises(ConfigError, match="schema version 99, this version reads 1"):
        FeatureStore(tmp_path / "s")
    for broken in ("{", "[]", "{}", json.dumps(seal_index({**index, "shards": [{}]}))):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=r"index\.json"):
            FeatureStore(tmp_path / "s")


@pytest.mark.parametrize("value", ["abc", [], 5, None, {"id": "x"}])
@pytest.mark.parametrize("name", ["target", "shards", "frozen", "target_layer_ids", "dtype"])
def test_an_index_of_another_shape_is_one_line(tmp_path: Path, name: str, value: object) -> None:
    if name == "frozen" and value is None:
        value = {}  # a store without frozen tensors is legal
    make_synthetic_store(tmp_path / "s", [5])
    file = tmp_path / "s" / "index.json"
    file.write_text(json.dumps(seal_index({**json.loads(file.read_text()), name: value})))
    with pytest.raises(ConfigError):
        FeatureStore(tmp_path / "s", verify="full")


def test_exchanged_lengths_are_found_although_every_size_fits(tmp_path: Path) -> None:
    make_synthetic_store(tmp_path / "s", [5, 7])
    file = tmp_path / "s" / "index.json"
    index = json.loads(file.read_text())
    index["shards"][0]["lengths"].reverse()
    file.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index\.json is corrupted: its checksum is sha256"):
        FeatureStore(tmp_path / "s")


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        FeatureStore(tmp_path / "nowhere")


def test_store_without_frozen_tensors_says_so(tmp_path: Path) -> None:
    with FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3))) as writer:
        writer.add_document(*_documents([4])[0])
    with pytest.raises(ConfigError, match="no target embedding"):
        FeatureStore(tmp_path / "s").frozen()


def test_tied_embedding_and_head_are_stored_once(tmp_path: Path) -> None:
    tied = torch.randn(32, 4)
    with FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3))) as writer:
        writer.write_frozen(tied, tied)
        writer.add_document(*_documents([4])[0])
    embedding, head = FeatureStore(tmp_path / "s").frozen()
    assert torch.equal(embedding, tied)
    assert head is embedding
    assert (tmp_path / "s" / "target_frozen.safetensors").stat().st_size < 2 * 32 * 4 * 4


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ((torch.tensor([1, 32]), torch.ones(2).bool(), torch.ones(2, 8)), "has token 32"),
        ((torch.tensor([1, -1]), torch.ones(2).bool(), torch.ones(2, 8)), "has token -1"),
        ((torch.tensor([1, 2]), torch.ones(3).bool(), torch.ones(2, 8)), "and loss_mask of"),
        (
            (torch.tensor([1, 2]), torch.ones(2).bool(), torch.ones(2, 7)),
            r"features of shape \[2, 8\], got",
        ),
        ((torch.tensor([]).long(), torch.ones(0).bool(), torch.ones(0, 8)), "is empty"),
    ],
)
def test_documents_that_do_not_fit_are_refused(
    tmp_path: Path, document: tuple[torch.Tensor, ...], message: str
) -> None:
    writer = FeatureStoreWriter(tmp_path / "s", StoreMeta(TARGET, (1, 3)))
    with pytest.raises(ConfigError, match=message):
        writer.add_document(*document)
    with pytest.raises(ConfigError, match="no document"):
        writer.close()


def test_meta_refuses_bad_taps_masks_and_dtypes() -> None:
    for ids, message in (
        ((1, 6), "target layer 6 does not exist: the target has 6 layers"),
        ((-1,), "target layer -1"),
        ((), "no target layer"),
        ((3, 1), "must ascend"),
        ((1, 1), "must ascend"),
    ):
        with pytest.raises(ConfigError, match=message):
            StoreMeta(TARGET, ids)
    for changes, message in (
        ({"mask_token_id": 32}, "outside the vocabulary of 32"),
        ({"mask_token_id": 5, "pad_token_id": 5}, "is the pad token"),
        ({"mask_token_id": 5, "eos_token_ids": (4, 5)}, "is the end-of-sequence token"),
    ):
        with pytest.raises(ConfigError, match=message):
            StoreMeta(TargetInfo(**{**TARGET.__dict__, **changes}), (1,))
    with pytest.raises(ConfigError, match="float64"):
        StoreMeta(TARGET, (1,), "float64")


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 3, (1, 14, 27)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_the_published_ones(
    num_layers: int, num_taps: int, ids: tuple[int, ...]
) -> None:
    assert default_target_layer_ids(num_layers, num_taps) == ids


def test_too_shallow_a_target_for_the_taps_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 taps do not fit"):
        default_target_layer_ids(5, 3)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    rows, width = 1_300_000, 1024  # 5.3 GB of features, all of them a hole but one row
    layout = ShardLayout.of(rows, width, "float32")
    meta = StoreMeta(TargetInfo(**{**TARGET.__dict__, "hidden_size": width}), (1,))
    shard = tmp_path / "shard-00000.safetensors"
    with open(shard, "wb") as file:
        file.truncate(layout.end)
        file.seek(layout.features_start + layout.row_bytes * (rows - 2))
        file.write(np.arange(width, dtype=np.float32).tobytes())
    entry = {"file": shard.name, "bytes": layout.end, "sha256": "", "lengths": [3, rows - 3]}
    index = {"schema_version": 1, **meta.to_json(), "frozen": None, "shards": [entry]}
    (tmp_path / "index.json").write_text(json.dumps(seal_index(index)))
    features = FeatureStore(tmp_path).read_features(1, rows - 6, rows - 3)
    assert features.sum(1).tolist() == [0, width * (width - 1) / 2, 0]
