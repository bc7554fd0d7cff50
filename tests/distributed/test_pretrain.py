"""The real entry point under torchrun: same losses at every layout, resume, empty batches."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.data.anchors import select_anchors
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.packing import PackedEpochs, read_pack
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from tests.distributed.jobs import logged, run_job
from tests.train.launches import HIDDEN_SIZE, TINY_DRAFTER, VOCAB_SIZE, make_store

pytestmark = pytest.mark.job

STEPS, SAVED_AT = 6, 4
COMMON = (
    *TINY_DRAFTER,
    *("--cp-comm-type", "splitkv", "--log-interval", "1", "--eval-interval", "3"),
    *("--train-iters", str(STEPS), "--lr-warmup-iters", "2"),
    *("--splitkv-query-cast", "all"),  # what travels then follows from the sizes alone
)
COMPARED = ("drafter loss", "accept_len", "accuracy/slot 1", "grad-norm", "drafter loss validation")


@dataclass(frozen=True)
class Uninterrupted:
    """A run at cp = 2 with two packs a step, which saved on its way."""

    arguments: tuple[str, ...]
    checkpoints: Path
    log: dict[str, dict[int, float]]
    output: str


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("pretrain")
    make_store(folder / "train")
    make_store(folder / "valid", lengths=(40, 31, 50, 77))
    arguments = (
        *COMMON,
        *("--global-batch-size", "2", "--feature-store", str(folder / "train")),
        *("--valid-feature-store", str(folder / "valid")),
    )
    checkpoints = folder / "checkpoints"
    saving = ("--save", str(checkpoints), "--save-interval", str(SAVED_AT))
    job = run_job(2, [*arguments, "--context-parallel-size", "2", *saving]).check()
    log = logged(checkpoints / "tensorboard")
    return Uninterrupted(arguments, checkpoints, log, job.output)


def _resume(run: Uninterrupted, folder: Path, ranks: int, cp: int) -> dict[str, dict[int, float]]:
    run_job(
        ranks,
        [
            *run.arguments,
            *("--context-parallel-size", str(cp), "--tensorboard-dir", str(folder)),
            *("--load", str(run.checkpoints), "--ckpt-step", str(SAVED_AT)),
        ],
    ).check()
    log = logged(folder)
    assert sorted(log["drafter loss"]) == list(range(SAVED_AT + 1, STEPS + 1))
    return log


def test_a_run_logs_what_it_should(uninterrupted: Uninterrupted) -> None:
    log = uninterrupted.log
    expected = {
        *("drafter loss", "accept_len", "trained tokens per pack", "plan imbalance"),
        "plan wait ms",
        *("bytes per layer", *(f"accuracy/slot {k}" for k in range(1, 4))),
    }
    assert expected <= log.keys()
    assert all(sorted(log[name]) == list(range(1, STEPS + 1)) for name in expected)
    for name in expected:
        assert f"{name}: " in uninterrupted.output
    # Training packs differ from step to step; the held-out ones are always the same.
    assert log["drafter loss validation"][6] < log["drafter loss validation"][3]
    assert {f"{name} validation" for name in expected} <= log.keys()
    # Evaluation sees the same packs and anchors each time.
    tokens = log["trained tokens per pack validation"]
    assert sorted(tokens) == [3, 6]
    assert tokens[3] == tokens[6]
    # cosine with warm-up
    rates = [log["learning-rate"][step] for step in range(1, STEPS + 1)]
    assert rates[0] < rates[1] > rates[2] > rates[-1]
    assert (uninterrupted.checkpoints / "drafter_config.json").is_file()
    assert "TFLOP" not in uninterrupted.output
    assert "parameters in transformer block in billions" not in uninterrupted.output


def test_bytes_per_layer_are_those_of_the_formula(uninterrupted: Uninterrupted) -> None:
    """Gather q, dO and scatter out, dq: 4 Q width; LSE, then LSE and delta, in fp32."""
    options = uninterrupted.arguments
    store = FeatureStore(options[options.index("--feature-store") + 1])
    packs = PackedEpochs(store.lengths, 96, 1234)

    def query_rows(item: int) -> int:
        pack = read_pack(store, packs.pack_documents(item))
        layout = select_anchors(
            pack.loss_mask,
            pack.cu_seqlens,
            num_anchors=6,
            block_size=4,
            seed=1234,
            step=item,
            sample_ids=pack.document_ids,
        )
        kept = max(1, int(layout.block_keep_mask.sum()))
        return 4 * (kept + kept % 2)  # an even number of blocks for two ranks

    for step, value in uninterrupted.log["bytes per layer"].items():
        rows = [query_rows(2 * (step - 1) + m) for m in range(2)]
        heads, width = 4, 32
        # All-gather and all-to-all send half of the elements at P = 2.
        elements = [q * (4 * width + 3 * heads) / 2 for q in rows]
        assert value == pytest.approx(4 * sum(elements) / len(elements))


def test_resume_at_the_same_layout_is_bitwise(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    log = _resume(uninterrupted, tmp_path, ranks=2, cp=2)
    for name in COMPARED:
        for step, value in log[name].items():
            assert value == uninterrupted.log[name][step], (name, step)


@pytest.mark.parametrize("cp", [1, 4])
def test_resume_at_another_layout_goes_on_alike(
    uninterrupted: Uninterrupted, tmp_path: Path, cp: int
) -> None:
    log = _resume(uninterrupted, tmp_path, ranks=cp, cp=cp)
    for name in COMPARED:
        for step, value in log[name].items():
            assert value == pytest.approx(uninterrupted.log[name][step], rel=2e-5), (name, step)


DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def test_a_distributed_optimizer_saves_on_the_side_and_resumes_elsewhere(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """tp 2 x cp 2 for three steps, dp 2 x cp 2 and evaluation at another batch size for three."""
    common = (*uninterrupted.arguments, "--context-parallel-size", "2", *DISTRIBUTED)
    checkpoints = str(tmp_path / "checkpoints")
    run_job(
        4,
        [
            *(*common, "--tensor-model-parallel-size", "2", "--exit-interval", "3"),
            *("--save", checkpoints, "--async-save", "--tensorboard-dir", str(tmp_path / "first")),
        ],
    ).check()
    run_job(
        4,
        [
            *(*common, "--load", checkpoints, "--eval-global-batch-size", "4"),
            *("--tensorboard-dir", str(tmp_path / "second")),
        ],
    ).check()
    first, second = logged(tmp_path / "first"), logged(tmp_path / "second")
    assert sorted(first["drafter loss"]) == [1, 2, 3]
    assert sorted(second["drafter loss"]) == [4, 5, 6]
    for name in COMPARED:
        for step, value in [*first[name].items(), *second[name].items()]:
            assert value == pytest.approx(uninterrupted.log[name][step], rel=2e-5), (name, step)


def test_packs_dealt_to_replicas_resume_bitwise_and_alike_at_another_number(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """Four packs a step: dp 2 stopped in the middle of an epoch, then dp 2 again, dp 1 and dp 4."""
    common = (*uninterrupted.arguments, "--global-batch-size", "4")
    checkpoints = tmp_path / "checkpoints"
    saving = ("--save", str(checkpoints), "--save-interval", "1")
    run_job(2, [*common, *saving, "--train-iters", "3"]).check()
    whole = logged(checkpoints / "tensorboard")
    for replicas in (2, 1, 4):
        folder = str(tmp_path / str(replicas))
        loading = ("--load", str(checkpoints), "--ckpt-step", "1", "--tensorboard-dir", folder)
        run_job(replicas, [*common, *loading, "--train-iters", "3"]).check()
        log = logged(Path(folder))
        assert sorted(log["drafter loss"]) == [2, 3]
        for name in COMPARED:
            for step, value in log[name].items():
                expected = whole[name][step]
                if replicas != 2:
                    expected = pytest.approx(expected, rel=2e-5)
                assert value == expected, (replicas, name, step)


def _write_store_with_unusable_documents(folder: Path) -> None:
    """One document of 64 tokens a pack; which item is unusable is chosen by the packer's order."""
    count, tokens, seed = 16, 64, 1234
    packs = PackedEpochs(np.full(count, tokens), tokens, seed)
    document_of = [int(packs.pack_documents(item)[0]) for item in range(count)]
    masks = torch.ones(count, tokens, dtype=torch.bool)
    # Four items a step: micro-batch m of replica r takes item 4 step + 2 m + r.
    masks[document_of[3]] = False  # step 1, micro-batch 2, replica 1: nothing supervised
    masks[document_of[7], :-5] = False  # step 2: supervised at its end only
    for item in range(8, 12):  # step 3: a whole global batch without supervision
        masks[document_of[item]] = False
    meta = StoreMeta(
        TargetInfo("synthetic", "unusable", 6, HIDDEN_SIZE, VOCAB_SIZE, VOCAB_SIZE - 1), (1, 3)
    )
    generator = torch.Generator().manual_seed(0)
    with FeatureStoreWriter(folder, meta) as writer:
        writer.write_frozen(*torch.randn(2, VOCAB_SIZE, HIDDEN_SIZE, generator=generator))
        for mask in masks:
            writer.add_document(
                torch.randint(VOCAB_SIZE - 1, (tokens,), generator=generator),
                mask,
                torch.randn(tokens, meta.feature_width, generator=generator),
            )


def test_a4_a12_unusable_packs_neither_hang_nor_poison_a_job(tmp_path: Path) -> None:
    """dp = 2 x cp = 2, two micro-batches a step.

    The rule: a step is taken on every rank alike, whatever is missing; a global batch without
    supervision takes it with a gradient of zero and logs a loss of zero over zero tokens.
    """
    _write_store_with_unusable_documents(tmp_path / "store")
    job = run_job(
        4,
        [
            *(*TINY_DRAFTER, "--cp-comm-type", "splitkv", "--context-parallel-size", "2"),
            *("--seq-length", "64", "--block-size", "8", "--global-batch-size", "4"),
            *("--feature-store", str(tmp_path / "store"), "--train-iters", "4"),
            *("--log-interval", "1", "--tensorboard-dir", str(tmp_path / "log")),
        ],
    ).check()
    log = logged(tmp_path / "log")
    assert sorted(log["drafter loss"]) == [1, 2, 3, 4]
    assert "nan iterations:   0" in job.output
    assert all(np.isfinite(list(values.values())).all() for values in log.values())
    for name in ("drafter loss", "accept_len", "trained tokens per pack", "grad-norm"):
        assert log[name][3] == 0.0, name
        assert all(log[name][step] > 0.0 for step in (1, 2, 4)), name


def test_bad_input_ends_every_rank_with_one_line_and_code_2(tmp_path: Path) -> None:
    job = run_job(2, ["--context-parallel-size", "2", "--cp-comm-type", "SplitKV"])
    assert job.returncode != 0
    assert job.output.count("error: ") == 1
    assert "--feature-store is missing" in job.output
    assert job.output.count("exitcode  : 2 ") == 2, job.output
