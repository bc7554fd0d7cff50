"""Defaults that fit a drafter: from the store, from the machine, and always the user's first."""

from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.train.arguments import add_arguments, complete_arguments, splitkv_options
from tests.train.launches import HIDDEN_SIZE, VOCAB_SIZE, make_store, parse


def test_a_short_command_is_a_whole_drafter(tmp_path: Path) -> None:
    args = parse(["--feature-store", "s", "--train-iters", "7"])
    complete_arguments(args, make_store(tmp_path / "s").meta)
    assert (args.hidden_size, args.vocab_size) == (HIDDEN_SIZE, VOCAB_SIZE)
    assert args.mask_token_id == VOCAB_SIZE - 1
    assert (args.num_attention_heads, args.num_query_groups) == (1, 1)
    assert args.cp_comm_type == ["splitkv"]
    assert (args.normalization, args.swiglu, args.qk_layernorm) == ("RMSNorm", True, True)
    assert (args.attention_dropout, args.hidden_dropout, args.add_bias_linear) == (0, 0, False)
    assert args.max_position_embeddings == args.seq_length
    assert args.lr_warmup_fraction == pytest.approx(0.04)
    assert args.tensorboard_log_interval == args.log_interval


def test_what_a_user_types_wins(tmp_path: Path) -> None:
    args = parse(
        [
            *("--lr-warmup-iters", "3", "--norm-epsilon", "1e-5", "--num-workers", "4"),
            *("--distributed-backend", "nccl", "--num-query-groups", "2", "--tensorboard-dir", "t"),
            *("--num-attention-heads", "4", "--save", "c", "--save-interval", "5"),
            *("--train-iters", "7", "--mask-token-id", "3", "--max-position-embeddings", "9999"),
        ]
    )
    complete_arguments(args, make_store(tmp_path / "s").meta)
    assert (args.lr_warmup_iters, args.lr_warmup_fraction) == (3, None)
    assert args.layernorm_epsilon == pytest.approx(1e-5)
    assert (args.num_workers, args.distributed_backend) == (4, "nccl")
    assert (args.num_attention_heads, args.num_query_groups) == (4, 2)
    assert (args.save_interval, args.tensorboard_dir) == (5, "t")
    assert (args.mask_token_id, args.max_position_embeddings) == (3, 9999)


def test_ranks_a_node_are_the_launchers_unless_said() -> None:
    assert splitkv_options(parse([])).ranks_per_node is None
    assert splitkv_options(parse(["--splitkv-ranks-per-node", "4"])).ranks_per_node == 4
    with pytest.raises(ConfigError, match="--splitkv-ranks-per-node 0 must be at least 1"):
        splitkv_options(parse(["--splitkv-ranks-per-node", "0"]))


def test_a_saving_run_saves_at_its_end_and_logs_beside_it(tmp_path: Path) -> None:
    args = parse(["--save", "c", "--train-iters", "7"])
    complete_arguments(args, make_store(tmp_path / "s").meta)
    assert args.save_interval == 7
    assert Path(args.tensorboard_dir) == Path("c/tensorboard")


@pytest.mark.parametrize(
    ("hidden_size", "head_width", "heads"),
    [(4096, None, 32), (576, None, 9), (96, None, 3), (56, None, 7), (96, 16, 6), (7, None, 1)],
)
def test_default_heads_are_as_wide_as_the_width_allows(
    tmp_path: Path, hidden_size: int, head_width: int | None, heads: int
) -> None:
    args = parse([])
    args.hidden_size, args.kv_channels = hidden_size, head_width
    complete_arguments(args, make_store(tmp_path / "s").meta)
    assert args.num_attention_heads == heads


@pytest.mark.parametrize("has_gpu", [True, False])
def test_cpu_settings_come_only_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    args = parse([])
    assert (args.distributed_backend == "gloo") is not has_gpu
    assert (args.transformer_impl == "local") is not has_gpu
    assert args.gradient_accumulation_fusion is has_gpu


def test_help_shows_our_options_in_a_group_of_their_own() -> None:
    import argparse

    text = add_arguments(argparse.ArgumentParser()).format_help()
    assert "split-KV drafter training" in text
    for option in ("--feature-store DIR", "--num-anchors N", "--plan-strategy NAME", "--target-id"):
        assert option in text
    assert "none, zigzag, lpt, balanced" in text
