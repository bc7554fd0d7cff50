"""Most bytes of live tensors at a time on a CPU, which has no counter of its own."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakStorage(TorchDispatchMode):
    """Counts storages that operations return while it is entered, forward and backward.

    Not buffers inside one operation, nor those of the communication library.

    Args:
        *inputs: tensors that were there before and are not counted.

    Attributes:
        peak: most bytes alive at a time.
    """

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in inputs}

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
        if key not in self._sizes:
            self._sizes[key] = size = storage.nbytes()
            weakref.finalize(storage, self._drop, key)
            self._live += size
            self.peak = max(self.peak, self._live)

    def _drop(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
