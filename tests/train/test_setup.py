"""The whole preparation of a run, in this process: what it refuses, what it leaves behind."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.config import ConfigError
from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE, DFlashConfig
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.train.arguments import splitkv_options
from megatron_splitkv.train.dataset import split_batch
from megatron_splitkv.train.drafter_file import check_checkpoint_folder
from megatron_splitkv.train.providers import DatasetsProvider
from megatron_splitkv.train.setup import TrainingSetup, prepare_training
from megatron_splitkv.train.strategy_choice import layer_shape, plan_cost_of
from tests.train.launches import TINY_DRAFTER, make_store
from tests.train.test_resume import write_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def fresh_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's globals of a process that has just started, before and after."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import unset_global_variables

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with cpu_mode():
        yield
    unset_global_variables()
    unset_num_microbatches_calculator()


def _prepare(monkeypatch: pytest.MonkeyPatch, store: Path, *argv: str) -> TrainingSetup:
    command = ["x", "--feature-store", str(store), "--train-iters", "4", *TINY_DRAFTER, *argv]
    monkeypatch.setattr("sys.argv", command)
    return prepare_training()


def test_a_good_launch_is_prepared_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    setup = _prepare(monkeypatch, store, "--save", str(tmp_path / "ckpt"))
    assert not dist.is_initialized()
    assert setup.valid_store is None
    assert setup.args.eval_iters == 0
    written = json.loads((tmp_path / "ckpt" / DRAFTER_CONFIG_FILE).read_text())
    assert written["target_id"] == "synthetic"
    assert written["target_checksum"] == setup.store.meta.target.checksum
    assert DFlashConfig.load(tmp_path / "ckpt" / DRAFTER_CONFIG_FILE) == setup.dflash
    assert [p.name for p in (tmp_path / "ckpt").glob("*.partial")] == []


def test_an_evaluation_is_one_pass_by_default(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    make_store(tmp_path / "valid", lengths=[96] * 5)
    setup = _prepare(monkeypatch, store, "--valid-feature-store", str(tmp_path / "valid"))
    assert setup.args.eval_iters == 5
    assert setup.args.seq_length == 96


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mask-token-id", "64"], "mask token 64 is outside the vocabulary of 64"),
        (["--mask-token-id", "-1"], "mask token -1 is outside"),
        (["--mask-token-id", "62"], "mask token 62 is the end-of-sequence token"),
        (["--seq-length", "48"], "document 0 has 70 tokens, more than --seq-length 48"),
        (["--global-batch-size", "3000000"], "global batch of 3000000 packs"),
        (["--lr", "1e-3", "--min-lr", "1e-2"], r"Megatron refuses.*min_lr"),
        (["--normalization", "LayerNorm"], r"normalization is 'LayerNorm'.*needs 'RMSNorm'"),
        (["--recompute-granularity", "full"], r"Megatron refuses.*recompute"),
    ],
)
def test_bad_launches_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        _prepare(monkeypatch, store, "--save", str(tmp_path / "ckpt"), *argv)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ckpt").exists()
    assert not dist.is_initialized()


@pytest.mark.parametrize("verify", ["auto", "size"])
def test_a_corrupted_embedding_is_named_however_the_store_is_verified(
    monkeypatch: pytest.MonkeyPatch, store: Path, verify: str
) -> None:
    """Checkpoints do not hold it: a run would go on with another target's numbers."""
    frozen = store / "target_frozen.safetensors"
    content = bytearray(frozen.read_bytes())
    content[-1] ^= 1
    frozen.write_bytes(content)
    with pytest.raises(ConfigError, match=r"target_frozen\.safetensors is corrupted"):
        _prepare(monkeypatch, store, "--verify-feature-store", verify)


def test_an_error_is_not_hidden_behind_megatrons_list_of_arguments(
    monkeypatch: pytest.MonkeyPatch, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="global batch of 3000000 packs"):
        _prepare(monkeypatch, store, "--global-batch-size", "3000000")
    assert "end of arguments" not in capsys.readouterr().out
    _prepare(monkeypatch, store)
    assert capsys.readouterr().out.count("end of arguments") == 1


def test_a_damaged_checkpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt"
    _prepare(monkeypatch, store, "--save", str(folder))
    write_checkpoint(folder).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--load .*__0_0\.distcp .*truncated"):
        _prepare(monkeypatch, store, "--load", str(folder))


def test_documents_to_validate_on_must_fit_a_pack_too(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    make_store(tmp_path / "valid", lengths=[97])
    valid = ("--valid-feature-store", str(tmp_path / "valid"), "--eval-iters", "1")
    with pytest.raises(ConfigError, match="97 tokens, more than --seq-length 96"):
        _prepare(monkeypatch, store, *valid)


def test_a_missing_store_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a feature store"):
        _prepare(monkeypatch, tmp_path / "nowhere")


@pytest.mark.parametrize("option", ["--load", "--save"])
def test_checkpoints_of_another_target_or_drafter_are_refused(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, option: str
) -> None:
    setup = _prepare(monkeypatch, store, "--save", str(tmp_path / "ckpt"))
    dflash, target = setup.dflash, setup.store.meta.target
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    check_checkpoint_folder(option, tmp_path / "ckpt", dflash, target)

    make_store(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=rf"{option} .*drafter of target 'synthetic' .*seed-0"):
        _prepare(monkeypatch, tmp_path / "other", option, str(tmp_path / "ckpt"))
    with pytest.raises(ConfigError, match=rf"{option} .*block_size 4, this run has 8"):
        _prepare(monkeypatch, store, option, str(tmp_path / "ckpt"), "--block-size", "8")
    (tmp_path / "ckpt" / DRAFTER_CONFIG_FILE).unlink()
    with pytest.raises(ConfigError, match=rf"{option} .*no readable {DRAFTER_CONFIG_FILE}"):
        _prepare(monkeypatch, store, option, str(tmp_path / "ckpt"))


def test_an_empty_load_folder_is_a_fresh_start(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    _prepare(monkeypatch, store, "--load", str(tmp_path / "nothing"))


def test_auto_is_resolved_at_start_and_says_why(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks = ("--context-parallel-size", "3", "--cp-comm-type", "auto")
    setup = _prepare(monkeypatch, store, *ranks)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("--cp-comm-type")]
    chosen = setup.args.cp_comm_type[0]
    assert setup.args.cp_comm_type == [chosen]
    assert setup.config.cp_comm_type == chosen
    assert setup.args.plan_strategy in ("balanced", "balanced-local")
    assert f"auto chose {chosen} " in line
    assert "over links loopback; next best: " in line
    assert "without a2a: --cp-comm-type a2a splits query heads" in line  # 4 heads on 3 ranks


def test_what_the_user_fixed_stays_and_links_decide_the_rest(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but hops is quick on this machine, and nothing but bytes counts."""
    odd = replace(PRESETS["loopback"], name="odd", intra_bandwidth=10.0, attention_flops=1e18)
    odd.save(tmp_path / "odd.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = ("--context-parallel-size", "2", "--links", str(tmp_path / "odd.json"))
    auto = ("--cp-comm-type", "p2p", "auto", "--plan-strategy", "lpt")
    setup = _prepare(monkeypatch, store, *ranks, *auto)
    first, second = setup.args.cp_comm_type
    assert first == "p2p"
    assert setup.args.plan_strategy == "lpt"
    assert splitkv_options(setup.args).links == odd
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("--cp-comm-type")]
    assert f"auto chose {second} " in line
    assert "with plan lpt" in line
    assert "over links odd; next best: " in line
    assert plan_cost_of(setup.args).row_seconds == 4 * (4 * 8 * 4 + 12) / 10.0


@pytest.mark.parametrize(("option", "near"), [((), 2), (("--splitkv-ranks-per-node", "1"), 1)])
def test_estimates_have_the_nodes_of_the_launch(
    monkeypatch: pytest.MonkeyPatch, store: Path, option: tuple[str, ...], near: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = ("--context-parallel-size", "4", "--links", "nvlink-400g")  # nodes of 8 there
    args = _prepare(monkeypatch, store, *ranks, *option).args
    links = splitkv_options(args).links
    assert links is not None
    assert links.ranks_per_node == 2
    assert layer_shape(args).node_ranks == near


@pytest.mark.parametrize(
    ("strategy", "order"), [("all_gather", "mirrored"), ("splitkv", "contiguous")]
)
def test_who_owns_which_blocks_follows_the_strategy(
    monkeypatch: pytest.MonkeyPatch, store: Path, strategy: str, order: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = ("--context-parallel-size", "2", "--cp-comm-type", strategy)
    setup = _prepare(monkeypatch, store, *ranks)
    for name, value in (("rank", 0), ("world_size", 2)):
        monkeypatch.setattr(
            parallel_state, f"get_context_parallel_{name}", lambda value=value: value
        )
    train, _, _ = DatasetsProvider(setup)((4, 0, 0))
    assert train.recipe.block_order == order
    plan = ContextPlan.from_arrays(split_batch({k: v[None] for k, v in train[0].items()})[1])
    assert plan.block_order == order


def test_without_auto_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = _prepare(monkeypatch, store)
    assert (setup.args.cp_comm_type, setup.args.plan_strategy) == (["splitkv"], "balanced")
    assert "auto chose" not in capsys.readouterr().out


def test_one_rank_has_nothing_to_choose(
    monkeypatch: pytest.MonkeyPatch, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = _prepare(monkeypatch, store, "--cp-comm-type", "auto", "--plan-strategy", "auto")
    assert (setup.args.cp_comm_type, setup.args.plan_strategy) == (["splitkv"], "auto")
    assert "auto chose splitkv: one rank, nothing travels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a file nor one of: nvlink-400g"),
        ("{", "not JSON"),
        ("{}", "lacks 'attention_flops'"),
    ],
)
def test_bad_links_are_one_line(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        _prepare(monkeypatch, store, "--links", str(tmp_path / "links.json"))
    assert "\n" not in str(error.value)
