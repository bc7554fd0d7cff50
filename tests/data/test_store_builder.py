"""Shards of one store, made by anybody in any order, are what one writer would have made."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import StoreIndex
from megatron_splitkv.data.store_writer import FeatureStoreWriter, StoreBuilder

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=6, hidden_size=4, vocab_size=32, mask_token_id=31
)
META = StoreMeta(TARGET, (1, 3), "bfloat16", final_hidden=True)
LENGTHS = [7, 5, 2, 40, 1, 9, 12]
SHARD_BYTES = 600  # row of 29 bytes: documents 0-2, 3, 4-5 and 6
EMBEDDING = torch.arange(32 * 4.0).view(32, 4)


def _document(i: int, meta: StoreMeta) -> tuple[torch.Tensor, ...]:
    n, generator = LENGTHS[i], torch.Generator().manual_seed(i)
    tokens = torch.randint(30, (n,), generator=generator), torch.arange(n) > 0
    if not meta.has_features:
        return tokens
    return (
        *tokens,
        torch.randn(n, meta.feature_width, generator=generator),
        torch.randn(n, 4, generator=generator),
    )


def _write_shard(builder: StoreBuilder, shard: int) -> None:
    first, last = builder.bounds[shard : shard + 2].tolist()
    documents = [_document(i, builder.meta) for i in range(first, last)]
    with builder.open_shard(shard, [d[0] for d in documents], [d[1] for d in documents]) as writer:
        for i, document in reversed(list(enumerate(documents))):
            if len(document) > 2:
                writer.write_rows(i, 0, document[2], document[3])


def _streamed(path: Path, meta: StoreMeta = META) -> dict[str, bytes]:
    with FeatureStoreWriter(path, meta, max_shard_bytes=SHARD_BYTES) as writer:
        writer.write_frozen(EMBEDDING, -EMBEDDING)
        for i in range(len(LENGTHS)):
            writer.add_document(*_document(i, meta))
    return _content(path)


def _content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def _builder(path: Path, meta: StoreMeta = META) -> StoreBuilder:
    return StoreBuilder(path, meta, LENGTHS, max_shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1]])
def test_any_order_and_several_builders_make_the_streamed_store(
    tmp_path: Path, order: list[int]
) -> None:
    path = tmp_path / "s"
    builders = [_builder(path), _builder(path)]
    assert builders[0].bounds.tolist() == [0, 3, 4, 6, 7]
    assert builders[0].missing() == [0, 1, 2, 3]
    for turn, shard in enumerate(order):
        _write_shard(builders[turn % 2], shard)
        assert builders[0].missing() == sorted(order[turn + 1 :])
    for builder in builders:
        builder.write_frozen(EMBEDDING, -EMBEDDING)
    builders[1].close()
    assert _content(path) == _streamed(tmp_path / "streamed")
    FeatureStore(path, verify="full")


def test_two_writers_of_one_shard_at_once_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "s"
    builder, another = _builder(path), _builder(path)
    document = _document(3, META)
    first = builder.open_shard(1, [document[0]], [document[1]])
    second = another.open_shard(1, [document[0]], [document[1]])
    _builder(path)  # one that starts meanwhile removes nothing of theirs
    second.write_rows(0, 0, document[2][:9], document[3][:9])
    first.write_rows(0, 0, document[2], document[3])
    entry = first.close()
    second.write_rows(0, 9, document[2][9:], document[3][9:])
    assert second.close() == entry
    assert builder.missing() == [0, 2, 3]
    assert not list(path.glob("*.partial"))


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    child = os.fork()
    if child == 0:
        writer = _builder(path).open_shard(1, *([t] for t in _document(3, META)[:2]))
        os._exit(0 if writer else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(path.glob("shard-00001.safetensors.*.partial"))) == 1
    assert _builder(path).missing() == [0, 1, 2, 3]
    assert list(path.iterdir()) == []


def test_a_store_without_all_its_shards_is_not_closed(tmp_path: Path) -> None:
    builder = _builder(tmp_path / "s")
    _write_shard(builder, 2)
    with pytest.raises(ConfigError, match=r"3 of 4 shards are missing \(shard-00000\.safetensors"):
        builder.close()
    with pytest.raises(ConfigError, match="is not a feature store"):
        FeatureStore(tmp_path / "s")


def test_a_store_may_be_closed_by_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    first, second, third = (_builder(path) for _ in range(3))
    for shard in range(4):
        _write_shard(first, shard)

    def write(index: StoreIndex, folder: Path) -> None:
        """Another one comes in front of this one's index, and takes the sidecars away."""
        monkeypatch.undo()
        second.close()
        index.write(folder)

    monkeypatch.setattr(StoreIndex, "write", write)
    first.close()
    content = _content(path)
    third.close()  # finds the index and no sidecar
    assert _content(path) == content
    FeatureStore(path, verify="full")


def test_a_damaged_or_foreign_shard_is_missing_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for shard in range(4):
        _write_shard(_builder(path), shard)
    os.truncate(path / "shard-00001.safetensors", 100)
    (path / "shard-00002.safetensors").unlink()
    (path / "shard-00003.safetensors.json").unlink()
    assert _builder(path).missing() == [1, 2, 3]
    other_target = replace(META, target=replace(TARGET, checksum="d"))
    assert _builder(path, other_target).missing() == [0, 1, 2, 3]
    exchanged = StoreBuilder(path, META, [5, 7, *LENGTHS[2:]], SHARD_BYTES)
    assert exchanged.bounds.tolist() == _builder(path).bounds.tolist()
    assert exchanged.missing() == [0, 1, 2, 3]


def test_frozen_tensors_are_written_again_only_if_others_are_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    _builder(path).write_frozen(EMBEDDING, EMBEDDING)
    file = path / "target_frozen.safetensors"
    before = file.stat().st_ino
    _builder(path).write_frozen(EMBEDDING.clone(), EMBEDDING.clone().as_strided((32, 4), (4, 1)))
    assert file.stat().st_ino != before  # untied now
    before = file.stat().st_ino
    _builder(path).write_frozen(EMBEDDING, EMBEDDING.clone())
    assert file.stat().st_ino == before
    file.write_bytes(b"x")
    _builder(path).write_frozen(EMBEDDING, EMBEDDING.clone())
    assert file.stat().st_size > 2 * EMBEDDING.nbytes


def test_bad_input_makes_no_folder(tmp_path: Path) -> None:
    for lengths, message in (([], "nothing to train on"), ([3, 0], "document 1 is empty")):
        with pytest.raises(ConfigError, match=message):
            StoreBuilder(tmp_path / "s", META, lengths)
    assert not (tmp_path / "s").exists()
    builder = _builder(tmp_path / "s")
    with pytest.raises(ConfigError, match=r"documents 3 to 4 with \[40\] tokens, got \[3\]"):
        builder.open_shard(1, [torch.arange(3)], [torch.ones(3).bool()])
    _streamed(tmp_path / "finished")
    with pytest.raises(ConfigError, match="already holds a feature store"):
        _builder(tmp_path / "finished")


def test_a_token_store_has_schema_3_and_no_features(tmp_path: Path) -> None:
    meta = StoreMeta.tokens_only(TARGET)
    built = tmp_path / "built"
    builder = _builder(built, meta)
    assert meta.row_bytes == 5
    assert builder.bounds.tolist() == [0, 7]
    builder.write_frozen(EMBEDDING, -EMBEDDING)
    _write_shard(builder, 0)
    builder.close()
    assert _content(built) == _streamed(tmp_path / "streamed", meta)

    store = FeatureStore(built, verify="full")
    index = json.loads((built / "index.json").read_text())
    assert (index["schema_version"], index["has_features"]) == (3, False)
    assert store.meta == meta
    assert store.lengths.tolist() == LENGTHS
    for i in range(len(LENGTHS)):
        ids, mask = _document(i, meta)
        np.testing.assert_array_equal(store.token_ids(i), ids.numpy())
        np.testing.assert_array_equal(store.loss_mask(i), mask.numpy())
    assert torch.equal(store.frozen()[1], -EMBEDDING)
    with pytest.raises(ConfigError, match=r"built is a token store.*--tokens-only.*--online-targe"):
        store.read_features(0, 0, 1)
    with pytest.raises(ConfigError, match="no final hidden states"):
        store.read_final_hidden(0, 0, 1)


def test_token_stores_and_features_do_not_mix(tmp_path: Path) -> None:
    tokens = torch.arange(3), torch.ones(3).bool()
    with pytest.raises(ConfigError, match="needs features of shape None, got"):
        FeatureStoreWriter(tmp_path / "t", StoreMeta.tokens_only(TARGET)).add_document(
            *tokens, torch.zeros(3, 8)
        )
    with pytest.raises(ConfigError, match=r"needs features of shape \[3, 8\], got None"):
        FeatureStoreWriter(tmp_path / "f", StoreMeta(TARGET, (1, 3))).add_document(*tokens)
    with pytest.raises(ConfigError, match="no target layer is tapped"):
        StoreMeta(TARGET, ())
    for ids, final_hidden in (((1,), False), ((), True)):
        with pytest.raises(ConfigError, match="a token store holds no states"):
            StoreMeta(TARGET, ids, final_hidden=final_hidden, has_features=False)
