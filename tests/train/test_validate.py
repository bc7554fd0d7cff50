"""Every bad launch is one `ConfigError` that names what to mend, before any process group."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.shard import seal_index
from megatron_splitkv.drafter import DSparkConfig
from megatron_splitkv.train.arguments import complete_arguments
from megatron_splitkv.train.setup import open_store
from megatron_splitkv.train.validate import (
    check_against_store,
    check_arguments,
    check_cp_comm_type,
    check_same_target,
    check_teacher,
)
from tests.drafter.harness import TINY
from tests.train.launches import TINY_DRAFTER, make_store, parse


def _parse(*argv: str, world_size: int = 1) -> argparse.Namespace:
    args = parse(["--feature-store", "s", "--train-iters", "4", *TINY_DRAFTER, *argv])
    args.world_size = world_size
    return args


def test_a_good_launch_passes() -> None:
    check_arguments(_parse("--context-parallel-size", "4", world_size=4))
    check_arguments(_parse("--cp-comm-type", "splitkv", "splitkv"))
    for name in CP_COMM_TYPES:
        check_arguments(_parse("--cp-comm-type", name))
    check_arguments(_parse("--cp-comm-type", "splitkv", "p2p", "--splitkv-gather", "q"))
    check_arguments(_parse("--cp-comm-type", "all_gather", "--splitkv-save", "own"))
    check_arguments(_parse("--use-distributed-optimizer", "--overlap-grad-reduce"))


def test_hypergraph_without_its_package_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kahypar", None)
    with pytest.raises(ConfigError, match=r"needs the package KaHyPar: pip install .*hypergraph"):
        check_arguments(_parse("--plan-strategy", "hypergraph"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cp-comm-type", "split_kv"], r"--cp-comm-type 'split_kv' .*choose one of: splitkv"),
        (
            ["--cp-comm-type", "p2p", "--splitkv-gather", "hidden"],
            "--splitkv-gather hidden means nothing for --cp-comm-type p2p; drop it",
        ),
        (
            ["--cp-comm-type", "p2p", "a2a", "--splitkv-fp32-reduce"],
            "--splitkv-fp32-reduce means nothing for --cp-comm-type p2p",
        ),
        (
            ["--cp-comm-type", "lv_xattn", "all_gather", "--splitkv-query-cast", "group"],
            "--splitkv-query-cast group means nothing for --cp-comm-type all_gather",
        ),
        (["--pipeline-model-parallel-size", "2"], "--pipeline-model-parallel-size 2"),
        (["--attention-dropout", "0.1"], r"--attention-dropout 0\.1"),
        (["--hidden-dropout", "0.1"], r"--hidden-dropout 0\.1"),
        (["--micro-batch-size", "2"], "--micro-batch-size 2 .*use 1"),
        (["--eval-micro-batch-size", "2"], "--eval-micro-batch-size 2"),
        (["--splitkv-gather", "k"], "--splitkv-gather 'k' .*auto, q, hidden"),
        (
            ["--splitkv-gather", "hidden", "--recompute-granularity", "selective"],
            "--recompute-modules core_attn .*--splitkv-gather q",
        ),
        (["--plan-strategy", "best"], "--plan-strategy 'best' .*zigzag, lpt"),
        (["--attention-kernel", "fast"], "--attention-kernel 'fast'"),
        (["--verify-feature-store", "no"], "--verify-feature-store 'no'"),
        (["--block-size", "1"], "--block-size 1 .*at least 2"),
        (["--num-anchors", "0"], "--num-anchors 0"),
        (["--chunks-per-rank", "0"], "--chunks-per-rank 0"),
        (
            ["--seq-length", "3", "--context-parallel-size", "4"],
            "--seq-length 3 gives 4 context-parallel ranks less than a row each",
        ),
        (["--loss-decay-gamma", "0"], r"--loss-decay-gamma 0"),
        (["--loss-weights", "focal"], "--loss-weights 'focal' is not known; .*decay, dpace"),
        (["--distillation-weight", "1.5"], r"--distillation-weight 1.5 must be in \[0, 1\]"),
        (
            ["--drafter", "domino", "--loss-weights", "dpace"],
            "--loss-weights dpace is for --drafter dflash: domino has a loss of its own; drop it",
        ),
        (
            ["--drafter", "dspark", "--distillation-weight", "0.5"],
            "--distillation-weight 0.5 is for --drafter dflash: dspark has a loss",
        ),
        (["--context-parallel-size", "2"], "1 ranks .*groups of 1 x 2"),
        (["--full-validation"], "--full-validation .*one pass"),
        (["--log-throughput"], "--log-throughput .*GPT"),
        (
            ["--use-distributed-optimizer", "--optimizer", "sgd"],
            "--use-distributed-optimizer cannot split --optimizer sgd",
        ),
        (["--use-precision-aware-optimizer"], "--use-precision-aware-optimizer needs Transformer"),
        (["--fp8-format", "hybrid"], "--fp8-format hybrid is not supported: .*--bf16"),
        (["--fp4-format", "e2m1"], "--fp4-format e2m1 is not supported"),
        (["--fp16"], "--fp16 is not supported: .*--bf16"),
        (["--cuda-graph-impl", "local"], "--cuda-graph-impl local is not supported: .*shapes"),
        (["--enable-cuda-graph"], "cuda-graph.* is not supported"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp is not supported: .*distributed-optimizer"),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2 is not supported"),
        (["--num-distributed-optimizer-instances", "2"], "--num-distributed-optimizer-instances 2"),
        (["--optimizer-cpu-offload"], "--optimizer-cpu-offload is not supported"),
        (["--expert-model-parallel-size", "2"], "--expert-model-parallel-size 2 .*dense"),
        (["--mtp-num-layers", "1"], "--mtp-num-layers 1 is not supported"),
        (["--data-path", "a", "b"], "--data-path a b is not supported: .*--feature-store"),
        (["--num-experts", "2"], "--num-experts 2 is not supported: .*dense"),
        (["--use-checkpoint-args"], "--use-checkpoint-args is not supported"),
        (["--dataloader-type", "cyclic"], "--dataloader-type 'cyclic'"),
        (["--ckpt-format", "torch"], "--ckpt-format 'torch' .*torch_dist"),
        (["--optimizer", "muon"], "--optimizer 'muon'"),
        (["--position-embedding-type", "rope"], "--position-embedding-type 'rope'"),
        (["--mock-data"], "--mock-data is not supported"),
        (["--loss-decay-gamma", "1e-40"], "--loss-decay-gamma 1e-40 is too small"),
        (["--log-interval", "0"], "--log-interval 0 .*at least 1"),
        (["--eval-interval", "0"], "--eval-interval 0 .*at least 1"),
        (["--eval-iters", "-1"], "--eval-iters -1 .*at least 0"),
        (["--train-iters", "-5"], "--train-iters -5 .*at least 1"),
        (["--seed", "-1"], "--seed -1 .*at least 0"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0 .*at least 1"),
        (["--context-parallel-size", "0"], "--context-parallel-size 0 .*at least 1"),
        (["--lr-warmup-fraction", "2"], r"--lr-warmup-fraction 2.0 must be in \[0, 1\)"),
        (["--lr-warmup-iters", "100"], "--lr-warmup-iters 100 leaves nothing of --train-iters 4"),
    ],
)
def test_bad_arguments_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_arguments(_parse(*argv))
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


def test_sequence_parallel_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sequence-parallel"):
        check_arguments(
            _parse("--sequence-parallel", "--tensor-model-parallel-size", "2", world_size=2)
        )


def test_sequence_length_follows_megatrons_rule() -> None:
    with pytest.raises(ConfigError, match=r"--seq-length 96 is not a multiple of .*10"):
        check_arguments(_parse("--context-parallel-size", "5", world_size=5))


@pytest.mark.parametrize("missing", ["--calculate-per-token-loss", "--feature-store"])
def test_required_options_are_named(missing: str) -> None:
    args = _parse()
    setattr(args, missing.removeprefix("--").replace("-", "_"), None)
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        check_arguments(args)


def test_a_run_without_an_end_is_refused() -> None:
    args = _parse()
    args.train_iters = None
    with pytest.raises(ConfigError, match="--train-iters"):
        check_arguments(args)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["split_kv", "SplitKV", "ring"])
def test_a15_every_entry_of_a_per_layer_list_is_checked(layer: int, wrong: str) -> None:
    values = ["splitkv"] * 3
    check_cp_comm_type(values, 3)
    values[layer] = wrong
    with pytest.raises(ConfigError, match=rf"{wrong}.*choose one of: splitkv"):
        check_cp_comm_type(values, 3)


@pytest.mark.parametrize("count", [2, 4])
def test_a15_a_list_of_another_length_names_both(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"{count} values for 3 layers"):
        check_cp_comm_type(["splitkv"] * count, 3)


def test_a15_one_value_applies_to_all() -> None:
    check_cp_comm_type(["splitkv"], 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hidden-size", "64"], "--hidden-size 64 differs from the target's 32"),
        (["--vocab-size", "65"], "--vocab-size 65 differs from the target's 64"),
        (["--target-id", "other"], "target 'synthetic', --target-id is 'other'"),
        (["--tensor-model-parallel-size", "3"], "--num-attention-heads 4 is not divisible .*3"),
        (["--tensor-model-parallel-size", "4"], "--num-query-groups 2 is not divisible .*4"),
        (
            ["--cp-comm-type", "a2a", "--context-parallel-size", "3"],
            "4 query heads .* do not divide among 3 ranks",
        ),
        (
            [
                *("--cp-comm-type", "splitkv", "a2a", "--context-parallel-size", "4"),
                *("--tensor-model-parallel-size", "2"),
            ],
            "2 query heads .* do not divide among 4 ranks",
        ),
    ],
)
def test_arguments_that_contradict_the_store_are_named(
    tmp_path: Path, argv: Sequence[str], message: str
) -> None:
    meta = make_store(tmp_path / "s").meta
    args = _parse(*argv)
    complete_arguments(args, meta)
    with pytest.raises(ConfigError, match=message):
        check_against_store(args, meta)


def test_stores_of_two_targets_are_refused(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "a").meta, make_store(tmp_path / "b", seed=1).meta
    check_same_target("a", one, "b", one)
    with pytest.raises(ConfigError, match="b holds features of another target"):
        check_same_target("a", one, "b", other)
    with pytest.raises(ConfigError, match=r"b taps layers \[2, 3\], a taps \[1, 3\]"):
        check_same_target("a", one, "b", replace(one, target_layer_ids=(2, 3)))


@pytest.mark.parametrize("verify", ["auto", "full"])
def test_a_corrupted_shard_is_named_with_its_checksum(tmp_path: Path, verify: str) -> None:
    make_store(tmp_path / "s")
    shard = tmp_path / "s" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors.*sha256"):
        open_store(str(tmp_path / "s"), verify)
    open_store(str(tmp_path / "s"), "size")  # the same size: only a checksum shows it


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    make_store(tmp_path / "s")
    shard = tmp_path / "s" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors.*bytes"):
        open_store(str(tmp_path / "s"), "size")


def test_a_tapped_layer_out_of_range_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "s")
    index = tmp_path / "s" / "index.json"
    content = json.loads(index.read_text())
    content["target_layer_ids"] = [1, 6]
    index.write_text(json.dumps(seal_index(content)))
    with pytest.raises(ConfigError, match="layer 6 does not exist"):
        open_store(str(tmp_path / "s"), "auto")


def test_a_teacher_needs_final_hidden_states_in_the_store() -> None:
    target = TargetInfo(
        id="t", checksum="c", num_layers=4, hidden_size=32, vocab_size=61, mask_token_id=60
    )
    without = StoreMeta(target, (0, 2))
    taught = replace(TINY, distillation_weight=0.5)
    check_teacher(TINY, "data", without)
    check_teacher(taught, "data", replace(without, final_hidden=True))
    with pytest.raises(ConfigError) as refusal:
        check_teacher(taught, "data", without)
    assert str(refusal.value) == (
        "--distillation-weight 0.5 learns from the target's distribution, and data has no final "
        "hidden states; prepare it with splitkv prepare --final-hidden"
    )
    shared = {field.name: getattr(TINY, field.name) for field in fields(TINY)}
    with pytest.raises(ConfigError, match="--drafter dspark learns from the target's distribution"):
        check_teacher(DSparkConfig(**shared), "data", without)
