"""A Megatron GPT gives the hidden states of the Hugging Face model that it was built from.

One pool, one run for every target: all layouts on the first tp * cp ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.testing import gloo_pool, relative_error, subgroup
from tests.distributed.jobs import logged, run_job
from tests.drafter.harness import TINY
from tests.online import tiny
from tests.online.tiny_folders import SHAPE, TARGETS, save_target
from tests.train.launches import TINY_DRAFTER

LAYOUTS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]  # (tp, cp)
TAPS = (0, 2, 3)  # the last layer too, whose output the final norm follows
LENGTHS = (7, 1, 12, 26, 2, 5)
BOUNDS = np.append(0, np.cumsum(LENGTHS))
TOKENS = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=BOUNDS[-1])


def hf_states(model: Any) -> dict[str, torch.Tensor]:
    """States of the pack, documents run one by one."""
    found: dict[int, list[torch.Tensor]] = {i: [] for i in TAPS}
    hooks = [
        model.model.layers[i].register_forward_hook(
            lambda layer, inputs, output, i=i: found[i].append(
                (output[0] if isinstance(output, tuple) else output).view(-1, SHAPE["hidden_size"])
            )
        )
        for i in TAPS
    ]
    final = [
        model.model(input_ids=torch.from_numpy(TOKENS[a:b])[None], use_cache=False)[0][0]
        for a, b in pairwise(BOUNDS)
    ]
    for hook in hooks:
        hook.remove()
    features = torch.cat([torch.cat(found[i]) for i in TAPS], dim=1)
    return {"features": features.contiguous(), "final_hidden": torch.cat(final)}


@contextmanager
def layout(tp: int, cp: int) -> Iterator[Any]:
    """Process groups of the first tp * cp ranks; None on the others."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection()
    members = {
        "tp": [range(i * tp, (i + 1) * tp) for i in range(cp)],
        "cp": [range(i, tp * cp, tp) for i in range(tp)],
        "pp": [(i,) for i in range(size)],
    }
    for name, every in members.items():
        for ranks in every:
            group = subgroup(ranks)
            if rank in ranks:
                setattr(groups, name, group)
    groups.embd = None
    with cpu_mode():
        yield groups if rank < tp * cp else None
    dist.barrier()


def differences(folder: str) -> dict[tuple[int, int], dict[str, float]]:
    """On every rank: relative errors at each layout."""
    from megatron_splitkv.online.megatron_target import build_megatron_target

    expected = load_file(Path(folder) / "states" / "expected.safetensors")
    errors: dict[tuple[int, int], dict[str, float]] = {}
    for tp, cp in LAYOUTS:
        with layout(tp, cp) as groups:
            if groups is None:
                continue
            before = torch.get_rng_state()
            target = build_megatron_target(folder, TAPS, pg_collection=groups, final_hidden=True)
            assert torch.equal(before, torch.get_rng_state())
            rank = dist.get_rank(groups.cp)
            source = target.source(BOUNDS)
            assert source.context_length == BOUNDS[-1]
            features, final_hidden = target.states(TOKENS, BOUNDS, rank)
            rows = torch.from_numpy(source.rows(rank))
            assert features.shape == (len(rows), len(TAPS) * SHAPE["hidden_size"])
            assert not features.requires_grad
            real = rows >= 0
            for what, found in (("features", features), ("final_hidden", final_hidden)):
                error = relative_error(found[real], expected[what][rows[real]])
                errors.setdefault((tp, cp), {})[what] = error
            errors[tp, cp]["rows"] = int(real.sum())
    return errors


@pytest.fixture(scope="module", params=TARGETS)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("target")
    sharded = {"max_shard_size": "20KB"} if request.param == "qwen3" else {}
    model = save_target(request.param, folder, **sharded)
    assert (folder / "model.safetensors").is_file() != bool(sharded)
    (folder / "states").mkdir()
    save_file(hf_states(model), folder / "states" / "expected.safetensors")
    return gloo_pool(6).run(differences, str(folder))


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_equals_hugging_face(answers: list[Any], tp: int, cp: int) -> None:
    ranks = [answers[rank][tp, cp] for rank in range(tp * cp)]
    assert sum(errors["rows"] for errors in ranks) == tp * sum(LENGTHS)
    for rank, errors in enumerate(ranks):
        assert errors["features"] <= 1e-5, (rank, errors)
        assert errors["final_hidden"] <= 1e-5, (rank, errors)


def in_bf16(folder: str) -> dict[str, Any]:
    """A model of one's own, saved in bf16: what is handed out by default, and when asked for."""
    from megatron_splitkv.online.gpt_from_hf import build_gpt_from_hf
    from megatron_splitkv.online.megatron_target import MegatronTarget

    expected = load_file(Path(folder) / "states" / "expected.safetensors")["features"]
    found: dict[str, Any] = {}
    with layout(1, 2) as groups:
        if groups is not None:
            model = build_gpt_from_hf(folder, pg_collection=groups)
            rank = dist.get_rank(groups.cp)
            plain = MegatronTarget(model, TAPS, groups.cp)
            features, final_hidden = plain.states(TOKENS, BOUNDS, rank)
            assert final_hidden is None
            assert features.dtype is torch.bfloat16
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            asked = MegatronTarget(model, TAPS, groups.cp, feature_dtype=torch.float32)
            wide, _ = asked.states(TOKENS, BOUNDS, rank)
            assert torch.equal(wide, features.float())
            rows = torch.from_numpy(plain.source(BOUNDS).rows(rank))
            error = relative_error(wide[rows >= 0], expected[rows[rows >= 0]])
            found = {"error": error, "hooks": [len(x._forward_hooks) for x in model.decoder.layers]}
    return found


def test_dtypes_are_the_targets_own_unless_asked_for(tmp_path: Path) -> None:
    model = save_target("qwen3", tmp_path)
    model.bfloat16().save_pretrained(tmp_path)
    rounded = hf_states(model)["features"]
    exact = hf_states(model.float())
    rounding = relative_error(rounded.float(), exact["features"])
    (tmp_path / "states").mkdir()
    save_file(exact, tmp_path / "states" / "expected.safetensors")
    for found in gloo_pool(6).run(in_bf16, str(tmp_path))[:2]:
        assert 0 < found["error"] <= 1.5 * rounding < 0.05
        assert found["hooks"] == [0] * SHAPE["num_hidden_layers"]


JOB = (
    *TINY_DRAFTER,
    *("--train-iters", "3", "--lr-warmup-iters", "1", "--log-interval", "1"),
    *("--global-batch-size", "2", "--distillation-weight", "0.5"),
)


@pytest.mark.job
def test_a_job_on_four_ranks_trains_as_one_process_with_a_store(tmp_path: Path) -> None:
    target = tiny.save_target(tmp_path / "target")
    tiny.save_store(tmp_path / "features", target)
    tiny.save_store(tmp_path / "tokens", target, tokens_only=True)
    online = (
        *("--tensor-model-parallel-size", "2", "--context-parallel-size", "2"),
        *("--cp-comm-type", "splitkv", "--online-target-backend", "megatron"),
        *("--online-target", str(target)),
        *("--target-layer-ids", ",".join(map(str, TINY.target_layer_ids))),
    )
    logs = {}
    for store, ranks, options in (("features", 1, ()), ("tokens", 4, online)):
        log = tmp_path / f"log of {store}"
        folders = ("--feature-store", str(tmp_path / store), "--tensorboard-dir", str(log))
        run_job(ranks, [*JOB, *folders, *options]).check()
        logs[store] = logged(log)
    for series in ("drafter loss", "accept_len", "grad-norm"):
        expected, found = logs["features"][series], logs["tokens"][series]
        assert sorted(found) == sorted(expected) == [1, 2, 3]
        for step, value in found.items():
            assert value == pytest.approx(expected[step], rel=2e-5), (series, step)
    # Rows and the teacher's rows, each once at most: the target's own traffic is not among it.
    most = 96 * (len(TINY.target_layer_ids) + 1) * TINY.hidden_size * 4
    assert all(0 < value <= most for value in logs["tokens"]["target bytes"].values())
