"""Items come ahead, in order, and so do exceptions. Events, no timing."""

import gc
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest

from megatron_splitkv.batch.prefetch import Prefetch

SECONDS = 30.0  # until an event that must come counts as missing


class Steps(Iterator[int]):
    """0, 1, 2, ... as long as it is allowed, telling when each one was finished and by whom."""

    def __init__(self, stop: int = 1 << 30) -> None:
        self.allowed = threading.Semaphore(0)
        self.finished = [threading.Event() for _ in range(8)]
        self.threads: set[str] = set()
        self.count = 0
        self.stop = stop

    def __next__(self) -> int:
        assert self.allowed.acquire(timeout=SECONDS)
        self.threads.add(threading.current_thread().name)
        if self.count == self.stop:
            raise StopIteration
        self.count += 1
        self.finished[self.count - 1].set()
        return self.count - 1


def allow(steps: Steps, count: int) -> None:
    for _ in range(count):
        steps.allowed.release()


def test_the_next_item_is_finished_before_anybody_asks_for_it() -> None:
    steps = Steps()
    prefetch = Prefetch(steps)
    allow(steps, 8)
    assert steps.count == 0  # nothing is taken before the first item is wanted
    for step in range(5):
        assert next(prefetch) == step
        stand_until_ready(prefetch)  # this step computes
        assert steps.count == step + 2
    assert steps.threads == {"splitkv-prefetch"}
    prefetch.close()
    assert prefetch.waits == 0


def stand_until_ready(prefetch: Prefetch[int]) -> None:
    shelf = prefetch._shelf
    with shelf.changed:
        assert shelf.changed.wait_for(shelf.has_answer, SECONDS)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_items_are_made_ahead(depth: int) -> None:
    steps = Steps()
    prefetch = Prefetch(steps, depth)
    allow(steps, 8)
    assert next(prefetch) == 0
    assert steps.finished[depth].wait(SECONDS)
    thread = prefetch._shelf._thread
    assert thread is not None
    thread.join(0.05)  # would make more if it could
    assert steps.count == 1 + depth
    prefetch.close()


class Box:
    pass


def test_an_item_is_the_consumers_alone_while_the_next_one_is_made() -> None:
    """A pack of features is large: one more of it must not stay behind."""
    making, finish = threading.Event(), threading.Event()

    def boxes() -> Iterator[Box]:
        yield Box()
        making.set()
        assert finish.wait(SECONDS)

    prefetch = Prefetch(boxes())
    box = weakref.ref(next(prefetch))
    assert making.wait(SECONDS)
    gc.collect()
    assert box() is None
    finish.set()
    assert list(prefetch) == []


def test_waits_are_counted() -> None:
    """But for the first one."""
    steps = Steps()
    prefetch = Prefetch(steps)
    waiting = threading.Event()
    shelf = prefetch._shelf
    wait_for = shelf.changed.wait_for

    def watched(predicate, timeout=None):  # type: ignore[no-untyped-def]
        if threading.current_thread() is threading.main_thread():
            waiting.set()
        return wait_for(predicate, timeout)

    shelf.changed.wait_for = watched  # type: ignore[method-assign]
    for step in range(2):
        waiting.clear()
        helper = threading.Thread(target=lambda: waiting.wait(SECONDS) and allow(steps, 1))
        helper.start()
        assert next(prefetch) == step  # made only after it was asked for
        helper.join()
        assert prefetch.waits == step
        assert prefetch.seconds_waited > 0
    prefetch.close()


def failing(error: BaseException) -> Iterator[int]:
    yield 0
    yield 1
    raise error


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_comes_in_its_turn_and_stays(error: BaseException) -> None:
    prefetch = Prefetch(failing(error), 4)
    assert [next(prefetch), next(prefetch)] == [0, 1]
    depths = []
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            next(prefetch)
        assert caught.value is error
        depths.append(len(traceback.extract_tb(caught.tb)))
        assert caught.traceback[-1].name == "failing"  # where it was raised is still told
    assert len(set(depths)) == 1
    thread = prefetch._shelf._thread
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_an_iterator_that_ends_ends_every_time() -> None:
    prefetch = Prefetch(iter([1, 2, 3]))
    assert list(prefetch) == [1, 2, 3]
    assert list(prefetch) == []
    assert list(Prefetch(iter([]))) == []


def test_a_dropped_prefetch_ends_its_thread_and_lets_go_of_the_source() -> None:
    steps = Steps()
    source = weakref.ref(steps)
    prefetch = Prefetch(steps)
    allow(steps, 4)
    next(prefetch)
    thread = prefetch._shelf._thread
    assert thread is not None
    del prefetch, steps
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert source() is None


def test_closing_ends_the_thread_after_the_item_that_it_is_making() -> None:
    steps = Steps()
    prefetch = Prefetch(steps)
    allow(steps, 2)
    next(prefetch)
    assert steps.finished[1].wait(SECONDS)
    prefetch.close()
    prefetch.close()
    thread = prefetch._shelf._thread
    assert thread is not None
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="was closed"):
        next(prefetch)
    unused = Prefetch(steps)
    unused.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(unused)


EXIT_WHILE_BUSY = """
import threading, torch
from megatron_splitkv.batch.prefetch import Prefetch

busy = threading.Event()

def items():
    yield 0
    busy.set()
    for _ in range(200):
        torch.ones(200_000).sum()
    yield 1

prefetch = Prefetch(items())
next(prefetch)
busy.wait()
"""


def test_a_process_may_exit_while_an_item_is_being_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WHILE_BUSY],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_depth_of_nothing_is_refused() -> None:
    for depth in (0, 1.5, True, "1"):
        with pytest.raises(ValueError, match=f"depth {depth!r} must be at least 1, and an int"):
            Prefetch(iter([]), depth)  # type: ignore[arg-type]


FORKED = """
import os
from megatron_splitkv.batch.prefetch import Prefetch

begun, unused = Prefetch(iter(range(9))), Prefetch(iter("child"))
next(begun)
if child := os.fork():
    assert os.waitpid(child, 0) == (child, 0)
    print(next(begun))
else:
    try:
        next(begun)
    except RuntimeError as error:
        print(error)
    begun.close()
    print(*unused)
"""


def test_a_forked_process_is_told_that_the_thread_is_elsewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused, unused, parent = done.stdout.splitlines()
    assert refused.startswith("this prefetch began in process ")
    assert (unused, parent) == ("c h i l d", "1")
