"""A target in the job trains as a store of its features does: losses, bytes, every layout."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.data.packing import Pack, PackedEpochs
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.plan.redistribution import rows_moved
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset, split_batch
from tests.distributed.jobs import logged, run_job
from tests.drafter.harness import (
    TINY,
    TINY_DOMINO,
    TINY_DSPARK,
    build_model,
    data_parallel,
    on_ranks,
    parallel_state,
    unwrapped,
)
from tests.online.tiny import LENGTHS, save_store, save_target
from tests.train.launches import TINY_DRAFTER
from tests.train.test_forward_step import _Timers

SEQ_LENGTH = 96
STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a store of its features, and one of the same tokens alone."""
    folder = tmp_path_factory.mktemp("online")
    target = save_target(folder / "target")
    save_store(folder / "features", target)
    save_store(folder / "tokens", target, tokens_only=True)
    return {name: folder / name for name in ("target", "features", "tokens")}


def _dataset(folder: Path, dflash: DFlashConfig, rank: int, size: int) -> PackDataset:
    store = FeatureStore(folder)
    online = not store.meta.has_features
    recipe = BlockRecipe(
        num_anchors=6,
        block_size=dflash.block_size,
        mask_token_id=dflash.mask_token_id,
        plan_strategy="balanced",
        chunks_per_rank=3,
        seed=5,
        label_shift=dflash.label_shift,
        final_hidden=dflash.needs_final_hidden,
    )
    return PackDataset(
        store,
        PackedEpochs(store.lengths, SEQ_LENGTH, seed=5),
        recipe,
        num_items=40,
        cp_rank=rank,
        cp_size=size,
        online=online,
    )


def _train(
    store: Path, target: Path, tp: int, cp: int, dflash: DFlashConfig, backend: str
) -> tuple[list[list[float]], list[float]]:
    """Losses and reports of a few steps of SGD, and the bytes that features took in each."""
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_splitkv.data.target import load_target
    from megatron_splitkv.online.hf_target import HFTarget
    from megatron_splitkv.train.forward_step import ForwardStep

    with parallel_state(tp, cp):
        ddp = data_parallel(build_model(tp, cp, dflash=dflash))
        dp_rank, dp_size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        dataset = _dataset(store, dflash, state.get_context_parallel_rank(), cp)
        open_target = None
        if dataset.online:
            final_hidden = dflash.needs_final_hidden
            if backend == "megatron":
                open_target = partial(_megatron_target, target, dflash.target_layer_ids)
            else:
                meta = FeatureStore(store.parent / "features").meta
                of_hf = HFTarget(load_target(target), meta, cp_size=cp, final_hidden=final_hidden)
                open_target = lambda groups: of_hf  # noqa: E731
        step = ForwardStep(_Timers(), lambda: 0.5, open_target)  # type: ignore[arg-type]
        history, sent = [], []
        for number in range(STEPS):
            ddp.zero_grad_buffer()
            mine = [2 * dp_size * number + m * dp_size + dp_rank for m in range(2)]
            collated = ({k: v[None] for k, v in dataset[item].items()} for item in mine)
            reports = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=collated,
                model=[ddp],
                num_microbatches=2,
                seq_length=1,
                micro_batch_size=1,
            )
            with torch.no_grad():
                for parameter in unwrapped(ddp).parameters():
                    if parameter.requires_grad:
                        parameter.sub_(parameter.main_grad, alpha=0.05)
            pairs = {name: torch.stack([r[name] for r in reports]).sum(0) for name in reports[0]}
            for pair in pairs.values():
                dist.all_reduce(
                    pair, group=state.get_data_parallel_group(with_context_parallel=True)
                )
            names = ("drafter loss", "accept_len", "trained tokens per pack")
            history.append([float(pairs[name][0] / pairs[name][1]) for name in names])
            sent.append(float(pairs["target bytes"][0]) if "target bytes" in pairs else 0.0)
        step.close()
        return history, sent


def _megatron_target(folder: Path, target_layer_ids: tuple[int, ...], groups: Any) -> Any:
    from megatron_splitkv.online.megatron_target import build_megatron_target

    return build_megatron_target(folder, target_layer_ids, pg_collection=groups, final_hidden=True)


def _both(
    folders: dict[str, Path], tp: int, cp: int, dflash: DFlashConfig, backend: str
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    layout = (folders["target"], tp, cp, dflash, backend)
    offline, _ = _train(folders["features"], *layout)
    online, sent = _train(folders["tokens"], *layout)
    return offline, online, sent


CASES = [
    pytest.param(2, 1, 1, TINY, "hf", id="dp2-cp1"),
    pytest.param(2, 1, 2, TINY, "hf", id="cp2"),
    pytest.param(3, 1, 3, TINY_DSPARK, "hf", id="cp3-dspark"),
    pytest.param(4, 2, 2, TINY, "hf", id="tp2-cp2"),
    pytest.param(4, 1, 2, TINY_DOMINO, "hf", id="dp2-cp2-domino"),
    pytest.param(4, 2, 2, TINY_DSPARK, "megatron", id="megatron-tp2-cp2-dspark"),
]


@pytest.mark.parametrize(("ranks", "tp", "cp", "dflash", "backend"), CASES)
def test_losses_are_those_of_a_store_and_only_rows_that_change_their_rank_travel(
    folders: dict[str, Path], ranks: int, tp: int, cp: int, dflash: DFlashConfig, backend: str
) -> None:
    expected = _expected_bytes(folders, ranks // (tp * cp), cp, dflash)
    for offline, online, sent in on_ranks(ranks, _both, folders, tp, cp, dflash, backend):
        # Another implementation adds up in another order.
        np.testing.assert_allclose(online, offline, rtol=1e-6 if backend == "hf" else 1e-5)
        losses = [step[0] for step in offline]
        assert len(set(losses)) == STEPS
        assert all(np.isfinite(losses))
        if dflash.needs_final_hidden:  # and the teacher's rows
            assert all(np.array(sent) > expected)
        else:
            assert sent == expected


def _expected_bytes(
    folders: dict[str, Path], dp: int, cp: int, dflash: DFlashConfig
) -> list[float]:
    """What all ranks of a tensor-parallel rank send of features in each step."""
    from megatron_splitkv.data.target import load_target
    from megatron_splitkv.online.hf_target import HFTarget

    meta = FeatureStore(folders["features"]).meta
    target = HFTarget(load_target(folders["target"]), meta, cp_size=cp, final_hidden=False)
    dataset = _dataset(folders["tokens"], dflash, 0, cp)
    rows, idle = np.zeros(STEPS), 0
    for item in range(2 * dp * STEPS):
        pack, arrays = split_batch({name: rows[None] for name, rows in dataset[item].items()})
        assert isinstance(pack, Pack)
        source = target.source(pack.cu_seqlens)
        rows[item // (2 * dp)] += rows_moved(ContextPlan.from_arrays(arrays), source)
        idle += sum(source.num_rows(rank) == 0 for rank in range(cp))
    assert idle > 0 or cp == 1  # packs of fewer documents than ranks are among them
    return (rows * meta.feature_width * 4).tolist()


JOB = (
    *TINY_DRAFTER,
    *("--context-parallel-size", "2", "--cp-comm-type", "splitkv", "--log-interval", "1"),
    *("--train-iters", "4", "--lr-warmup-iters", "1", "--global-batch-size", "2"),
    *("--eval-interval", "2", "--distillation-weight", "0.5"),
)


@pytest.mark.job
def test_a_job_trains_evaluates_and_resumes_as_with_a_store(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    valid = tmp_path / "valid"
    save_store(valid, folders["target"], LENGTHS[:4])
    checkpoints = tmp_path / "checkpoints"
    stores = ("--valid-feature-store", str(valid))
    online = (
        *("--feature-store", str(folders["tokens"]), "--online-target", str(folders["target"])),
        *("--target-layer-ids", ",".join(map(str, TINY.target_layer_ids))),
    )
    offline = ("--feature-store", str(folders["features"]))
    saving = ("--save", str(checkpoints), "--save-interval", "2")
    for name, argv in (
        ("offline", offline),
        ("online", (*online, *saving, "--exit-interval", "2")),
        ("resumed", (*online, "--load", str(checkpoints))),
    ):
        log = ("--tensorboard-dir", str(tmp_path / name))
        run_job(2, [*JOB, *stores, *argv, *log]).check()
    expected, first, rest = (logged(tmp_path / n) for n in ("offline", "online", "resumed"))
    assert sorted(first["drafter loss"]) == [1, 2]
    assert sorted(rest["drafter loss"]) == [3, 4]
    for name in ("drafter loss", "accept_len", "grad-norm", "drafter loss validation"):
        found = {**first[name], **rest[name]}
        assert sorted(found) == sorted(expected[name])
        for step, value in found.items():
            assert value == pytest.approx(expected[name][step], rel=2e-6), (name, step)
    assert "target bytes" not in expected
    assert all(value > 0 for value in first["target bytes"].values())
    # The target is in no checkpoint: the drafter's weights alone are.
    written = json.loads((checkpoints / "drafter_config.json").read_text())
    assert tuple(written["target_layer_ids"]) == TINY.target_layer_ids
