"""Sums of what all ranks contribute to a rank's rows, on their way over one level or two."""

from typing import TYPE_CHECKING

import torch

from megatron_splitkv.comm.collectives import Pending

if TYPE_CHECKING:
    from megatron_splitkv.comm.row_exchange import RowExchange


class PendingSum:
    """A launched sum of contributions; `wait` is `Pending`'s.

    Of two levels the second can only send what the first has brought. On a GPU that wait, the sum
    and the second level are enqueued at once on a stream of their own, so both levels travel behind
    what the caller computes; the host waits for nothing. On a CPU the second begins in `wait`.

    Args:
        levels: of the exchange.
        attended: see `RowExchange.launch_sum`, as the arguments after it.
        label: name of the rows.
        wire_dtype: dtype on the way.
        dtype: dtype of sums.
    """

    def __init__(
        self,
        levels: tuple["RowExchange", ...],
        attended: torch.Tensor,
        label: str,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self._levels, self._label = levels, label
        self._wire_dtype, self._dtype = wire_dtype, dtype
        self._total: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._done: torch.cuda.Event | None = None
        if not levels:
            self._total = attended.to(dtype)
            return
        self._pending = self._launch(levels[0], attended)
        side = _side_stream(attended.device) if len(levels) > 1 else None
        if side is not None:
            self._run_on(side)

    def wait(self) -> torch.Tensor:
        """The sums of this rank's own rows; on a GPU the current stream waits, not the host."""
        total = self._finish()
        if self._done is not None:
            stream = torch.cuda.current_stream(total.device)
            stream.wait_event(self._done)
            total.record_stream(stream)
            self._done = None
        return total

    def _launch(self, level: "RowExchange", rows: torch.Tensor) -> Pending:
        return level.launch_return(level.packed(rows, self._wire_dtype), label=self._label)

    def _finish(self) -> torch.Tensor:
        if self._total is None:
            first, *others = self._levels
            assert self._pending is not None
            total, self._pending = first.sum(self._pending.wait(), self._dtype), None
            for level in others:
                total = level.sum(self._launch(level, total).wait(), self._dtype)
            self._total = total
        return self._total

    def _run_on(self, side: torch.cuda.Stream) -> None:
        assert self._pending is not None
        # The allocator must not hand these out again before the side stream is done with them.
        for tensor in (self._pending.sent, self._pending.result):
            if tensor is not None:
                tensor.record_stream(side)
        with torch.cuda.stream(side):
            self._finish()
        self._done = side.record_event()


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which second levels are enqueued; None where nothing is enqueued."""
    if device.type != "cuda":
        return None
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
