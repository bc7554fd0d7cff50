"""Bytes of the tensors that are alive, operation by operation: what an inventory is held against.

Counts what torch's operations return, on the CPU, forward and backward: not the temporary buffers
inside one operation, and not what a communication backend allocates for itself.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks storages that are made while it is entered.

    Attributes:
        live: bytes of those that are still alive.
        peak: most of them at a time since `restart`.
        made: bytes of each that was made since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.made: list[int] = []
        self._sizes: dict[int, int] = {}

    def restart(self) -> None:
        """Forget the peak; what is alive stays counted."""
        self.peak, self.made = self.live, []

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Inputs: their storages are not new when an operation returns a view of them."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size = storage.nbytes()
        weakref.finalize(storage, self._drop, key)
        self.live += size
        self.made.append(size)
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
