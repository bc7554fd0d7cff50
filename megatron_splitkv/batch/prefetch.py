"""One item ahead: what the next step needs is read and planned while this one computes."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType

import torch

_LEAVING_SECONDS = 5.0


class Prefetch[T](Iterator[T]):
    """Runs an iterator on a thread of its own, a little ahead of whoever consumes it.

    Items come in order and so does the exception that ends them, `StopIteration` included; every
    later `next` raises it again. Nothing is taken from the iterator before the first `next`, and
    the process that calls it first is the only one that may. The thread ends with the iterator,
    when it is closed or dropped, and when the process exits.

    Args:
        iterator: the source; from now on nobody else may take from it.
        depth: items that are made ahead of the consumer.

    Attributes:
        waits: how often the consumer came before the item was there, not counting the first time,
            when nothing can be ready.
        seconds_waited: how long it stood there, the first time included.

    Raises:
        ValueError: the depth is no int, or less than 1.
    """

    def __init__(self, iterator: Iterator[T], depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth {depth!r} must be at least 1, and an int")
        self.waits = 0
        self.seconds_waited = 0.0
        self._shelf = _Shelf(iterator, depth)
        # The thread knows the shelf alone, so that dropping this object ends it.
        self._close = weakref.finalize(self, self._shelf.close)

    def __next__(self) -> T:
        """The next item; waits for it if it is not ready.

        Raises:
            RuntimeError: it was closed, or began in the process from which this one was forked.
        """
        shelf = self._shelf
        first = shelf.start()
        with shelf.changed:
            if not shelf.has_answer():
                self.waits += not first
                began = time.perf_counter()
                shelf.changed.wait_for(shelf.has_answer)
                self.seconds_waited += time.perf_counter() - began
            if shelf.closed:
                raise RuntimeError("this prefetch was closed; it has no more items")
            if not shelf.items:
                assert shelf.end is not None
                raise shelf.end.with_traceback(shelf.trace)  # or it would grow at every call
            shelf.changed.notify_all()
            return shelf.items.popleft()

    def close(self) -> None:
        """Forget what was made ahead and end the thread, after the item that it is making."""
        self._close()


class _Shelf[T]:
    """Where the thread puts items and the consumer finds them."""

    def __init__(self, iterator: Iterator[T], depth: int) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.end: BaseException | None = None
        self.trace: TracebackType | None = None
        self.closed = False
        self._iterator = iterator
        self._depth = depth
        self._thread: threading.Thread | None = None
        self._process: int | None = None  # that has the thread

    def start(self) -> bool:
        """Start the thread unless it has been; whether it has not."""
        if self._began_elsewhere():  # before any lock, which nobody here would ever let go
            raise RuntimeError(
                f"this prefetch began in process {self._process}, from which this one was forked "
                "without its thread; use it there, or make one here"
            )
        if self._thread is not None or self.closed:
            return False
        # New threads use device 0 unless told, and pinning memory would open a context there.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._fill, args=(device,), name="splitkv-prefetch", daemon=True
        )
        self._process = os.getpid()
        self._thread.start()
        return True

    def _began_elsewhere(self) -> bool:
        return self._process not in (None, os.getpid())

    def has_answer(self) -> bool:
        """Whether a consumer that waits can go on."""
        return bool(self.items) or self.end is not None or self.closed

    def close(self) -> None:
        """See `Prefetch.close`."""
        if self._began_elsewhere():
            return
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVING_SECONDS)

    def _fill(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.items) < self._depth or self.closed)
                if self.closed:
                    return
            try:
                item = next(self._iterator)
            except BaseException as error:
                with self.changed:
                    self.end, self.trace = error, error.__traceback__
                    self.changed.notify_all()
                return
            with self.changed:
                if not self.closed:
                    self.items.append(item)
                    self.changed.notify_all()
            del item  # the consumer's alone, also while the next one is made
