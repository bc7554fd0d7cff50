"""Offline data of speculators: an Arrow dataset of tokens, ``hs_{i}.safetensors`` beside it.

Row i of the dataset (written by `datasets`' ``save_to_disk``) has ``input_ids``, ``loss_mask`` and
``seq_len``; ``hidden_states/hs_{i}.safetensors`` has the same ``token_ids[n]`` and
``hidden_states[n, C + 1, d]``, whose last plane is the target's last layer before its final norm.
Its layer ids count the embedding as 0, so they are the ids used here plus 1. Rows without a file
are samples that speculators failed to capture.

Source:
    speculators ``scripts/data_generation_offline2.py``, ``scripts/launch_vllm.py`` and
    ``src/speculators/train/data.py``; vLLM ``ExampleHiddenStatesConnector`` (layout only).
"""

import importlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_data import OfflineSample, check_lengths, natural_order

_HINT = "name the --output of speculators' prepare_data.py"
# Input ids and loss mask of a row.
TokenRow = tuple[np.ndarray, np.ndarray]


class SpeculatorsData:
    """Samples of a speculators folder whose hidden states are there.

    Args:
        folder: the dataset's folder, with ``hidden_states/hs_{i}.safetensors`` in it.
        rows: tokens of all samples; those of the folder's Arrow files when None.

    Attributes:
        num_rows: rows of the dataset, with and without hidden states.

    Raises:
        ConfigError: no such folder, no dataset or no hidden states in it, or more of these than
            rows.
    """

    trainer = "speculators"
    layer_id_offset = 1

    def __init__(self, folder: Path, rows: Sequence[TokenRow] | None = None) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; {_HINT}")
        states = folder / "hidden_states"
        names = (p for p in states.glob("hs_*.safetensors") if p.stem[3:].isdecimal())
        self._paths = sorted(names, key=natural_order)
        if not self._paths:
            raise ConfigError(
                f"{states} holds no hs_*.safetensors; generate them with speculators' "
                "data_generation_offline.py (its default --output), or link them there"
            )
        self._rows = ArrowRows(folder) if rows is None else rows
        self.num_rows = len(self._rows)
        if (last := _row_of(self._paths[-1])) >= self.num_rows:
            raise ConfigError(
                f"{self._paths[-1]} belongs to row {last}, but the dataset has {self.num_rows} "
                "rows: its tokens were prepared anew; generate the hidden states again"
            )

    def __len__(self) -> int:
        return len(self._paths)

    def files(self) -> Sequence[Path]:
        """Those of the dataset, and one a sample in the order of the samples."""
        dataset = [path for path in self.folder.iterdir() if path.suffix in (".arrow", ".json")]
        return [*sorted(dataset, key=natural_order), *self._paths]

    def open(self, number: int) -> OfflineSample:
        """Open one sample, in the order of the dataset's rows.

        Raises:
            ConfigError: a file of another layout or of other tokens than its row, named.
        """
        path = self._paths[number]
        try:
            file = safe_open(path, framework="pt")
            token_ids = file.get_tensor("token_ids").long()
            states = file.get_slice("hidden_states")
            shape = states.get_shape()
            dtype = states[:0].dtype
        except (OSError, SafetensorError) as error:
            first_line = str(error).splitlines()[0]
            raise ConfigError(
                f"{path} cannot be read as token_ids and hidden_states: {first_line}"
            ) from error
        if token_ids.ndim != 1 or len(shape) != 3 or shape[1] < 2:
            raise ConfigError(
                f"{path}: token_ids {list(token_ids.shape)} and hidden_states {list(shape)}, "
                "expected [S] and [S, layers + 1, d] with at least one layer"
            )
        input_ids, loss_mask = (torch.from_numpy(column) for column in self._rows[_row_of(path)])
        check_lengths(
            path,
            {
                "input_ids": len(input_ids),
                "loss_mask": len(loss_mask),
                "token_ids": len(token_ids),
                "hidden_states": shape[0],
            },
        )
        if not torch.equal(token_ids, input_ids):
            at = int((token_ids != input_ids).nonzero()[0])
            raise ConfigError(
                f"{path}: token {at} is {int(token_ids[at])}, but {int(input_ids[at])} in row "
                f"{_row_of(path)} of the dataset: its tokens were prepared anew; generate the "
                "hidden states again"
            )

        def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            planes = states[start:stop]  # [r, C + 1, d]
            return planes[:, :-1].flatten(1), planes[:, -1]

        width = (shape[1] - 1) * shape[2]
        return OfflineSample(path, token_ids, loss_mask, width, shape[2], dtype, read)


class ArrowRows(Sequence[TokenRow]):
    """Token rows of a dataset that `datasets` saved, read from its mapped Arrow files.

    Args:
        folder: with ``state.json`` and the files that it names.

    Raises:
        ConfigError: pyarrow is not installed, or no such dataset.
    """

    def __init__(self, folder: Path) -> None:
        arrow = _import_pyarrow()
        self._folder = folder
        try:
            state = json.loads((folder / "state.json").read_text())
            names = [entry["filename"] for entry in state["_data_files"]]
            self._columns: list[tuple[Any, Any]] = []
            for name in names:
                table = arrow.ipc.open_stream(arrow.memory_map(str(folder / name))).read_all()
                self._columns.append((table.column("input_ids"), table.column("loss_mask")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Arrow's own errors are ValueErrors and OSErrors.
            first_line = str(error).splitlines()[0]
            raise ConfigError(
                f"{folder} is no dataset with input_ids and loss_mask ({first_line}); {_HINT}"
            ) from error
        self._ends = list(accumulate(len(ids) for ids, _ in self._columns))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: Any) -> Any:
        """Input ids int64 ``[n]`` and loss mask bool ``[n]`` of one row."""
        table = bisect_right(self._ends, row)
        at = row - (self._ends[table - 1] if table else 0)
        lists = [column[at].values for column in self._columns[table]]
        if any(numbers is None for numbers in lists):
            raise ConfigError(
                f"{self._folder}: row {row} of the dataset has no input_ids or no loss_mask; "
                f"{_HINT}"
            )
        ids, mask = (numbers.to_numpy(zero_copy_only=False) for numbers in lists)
        return ids.astype(np.int64), mask != 0


def _import_pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            "reading speculators' dataset needs pyarrow; install it with `pip install pyarrow`"
        ) from error


def _row_of(path: Path) -> int:
    return int(path.stem.removeprefix("hs_"))
