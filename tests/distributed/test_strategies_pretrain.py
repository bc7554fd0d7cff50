"""``--cp-comm-type`` at the real entry point: a layer of every peer learns what split-KV learns."""

from pathlib import Path

import pytest

from megatron_splitkv.attention.strategies.volumes import TrafficShape, volume
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.data.anchors import select_anchors
from megatron_splitkv.data.packing import PackedEpochs, read_pack
from megatron_splitkv.data.store import FeatureStore
from tests.distributed.jobs import logged, run_job
from tests.train.launches import TINY_DRAFTER, make_store

pytestmark = pytest.mark.job

PEERS = CP_COMM_TYPES[1:]
STEPS, SEED, LENGTH = 3, 1234, 96
COMPARED = ("drafter loss", "accept_len", "grad-norm")


def _log(folder: Path, store: Path, *types: str) -> dict[str, dict[int, float]]:
    run_job(
        2,
        [
            *(*TINY_DRAFTER, "--num-layers", str(len(PEERS)), "--context-parallel-size", "2"),
            *("--feature-store", str(store), "--train-iters", str(STEPS)),
            *("--lr-warmup-iters", "1", "--log-interval", "1", "--tensorboard-dir", str(folder)),
            *("--cp-comm-type", *types),
        ],
    ).check()
    return logged(folder)


def _bytes_per_layer(store: FeatureStore, item: int) -> float:
    """Mean over layers and ranks, in fp32; formulas are linear in a rank's rows."""
    pack = read_pack(store, PackedEpochs(store.lengths, LENGTH, SEED).pack_documents(item))
    layout = select_anchors(
        pack.loss_mask,
        pack.cu_seqlens,
        num_anchors=6,
        block_size=4,
        seed=SEED,
        step=item,
        sample_ids=pack.document_ids,
    )
    kept = max(1, int(layout.block_keep_mask.sum()))
    shape = TrafficShape(
        query_rows=4 * (kept + kept % 2),
        context_rows=len(pack.token_ids),
        cp_size=2,
        heads=4,
        kv_heads=2,
        head_width=8,
        itemsize=4,
    )
    return sum(volume(name, shape).bytes for name in PEERS) / len(PEERS)


def test_a_drafter_with_a_layer_of_every_peer(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    ours = _log(tmp_path / "ours", tmp_path / "store", "splitkv")
    theirs = _log(tmp_path / "theirs", tmp_path / "store", *PEERS)
    for name in COMPARED:
        assert sorted(theirs[name]) == [1, 2, 3]
        for step, value in theirs[name].items():
            assert value == pytest.approx(ours[name][step], rel=1e-5), (name, step)
    store = FeatureStore(tmp_path / "store")
    for step, value in theirs["bytes per layer"].items():
        assert value == pytest.approx(_bytes_per_layer(store, step - 1), rel=1e-6)
    assert theirs["bytes per layer"] != ours["bytes per layer"]
