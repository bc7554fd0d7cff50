"""The pool itself: results in rank order, failures with their rank, hangs ended, new life after."""

import os
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.testing import close_gloo_pools, gloo_pool, subgroup


def _sum_of_ranks(offset: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.get_num_threads()


def _subgroup_sums() -> list[float]:
    sums = []
    for size in (1, 2):
        group = subgroup(range(size))
        if dist.get_rank() < size:
            value = torch.ones(())
            dist.all_reduce(value, group=group)
            sums.append(float(value))
    return sums


def _fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("one rank fails")
    dist.all_reduce(torch.ones(()))  # the others wait for it in vain


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_results_come_in_rank_order() -> None:
    results = gloo_pool(2).run(_sum_of_ranks, 10)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert all(float(total) == 21.0 and threads == 1 for _, total, threads in results)


def test_subgroups_are_smaller_worlds() -> None:
    assert gloo_pool(2).run(_subgroup_sums) == [[1.0, 2.0], [2.0]]


def test_failure_names_rank_and_traceback_and_the_pool_lives_on() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1.*_fail_on_last_rank.*one rank fails"):
        gloo_pool(2).run(_fail_on_last_rank)
    assert len(gloo_pool(2).run(_sum_of_ranks, 0)) == 2


def test_hang_is_ended_and_fails() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not answer within 0\.5 s"):
        gloo_pool(2).run(_sleep, 60.0, timeout=0.5)
    assert len(gloo_pool(2).run(_sum_of_ranks, 0)) == 2


def _what_is_imported() -> tuple[int, bool]:
    return os.getpid(), "megatron.core" in sys.modules


def test_ranks_are_born_with_megatron() -> None:
    assert all(imported for _, imported in gloo_pool(2).run(_what_is_imported))


def test_closed_pools_start_again() -> None:
    (before, _), _ = gloo_pool(2).run(_what_is_imported)
    close_gloo_pools()
    assert not psutil.pid_exists(before)
    (after, _), _ = gloo_pool(2).run(_what_is_imported)
    assert after != before
