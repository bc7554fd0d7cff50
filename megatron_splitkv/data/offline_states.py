"""Documents' hidden states from another trainer's files, in the pieces that a target gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_data import OfflineData
from megatron_splitkv.data.target import Progress, silent
from megatron_splitkv.data.target_states import StatePiece

_PIECE_BYTES = 64 << 20


class OfflineStates:
    """Reads samples by row ranges; a process holds one piece at a time, never a sample.

    Args:
        data: the files.
        numbers: by store, the samples whose documents it holds, in its order.
        final_norm: gives the target's final norm where the files' final hidden states are those in
            front of it; None takes them as they are. Asked once there is work.
        piece_bytes: of the largest piece.
    """

    def __init__(
        self,
        data: OfflineData,
        numbers: Mapping[str, Sequence[int]],
        final_norm: Callable[[], nn.Module] | None = None,
        *,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        self._data = data
        self._numbers = numbers
        self._final_norm = final_norm
        self._piece_bytes = piece_bytes

    @torch.no_grad()
    def read(
        self,
        store: str,
        documents: range,
        token_ids: Sequence[torch.Tensor],
        progress: Progress = silent,
    ) -> Iterator[StatePiece]:
        """Hidden states of consecutive documents of a store, see `StateSource`.

        Args:
            store: whose documents.
            documents: their numbers in the store; a piece's `document` counts from the first.
            token_ids: ``[n]`` each.
            progress: told the tokens done.

        Yields:
            Pieces in the order of the tokens. Their final hidden states have no columns where the
            files have none.

        Raises:
            ConfigError: files that cannot be read or that have changed, and hidden states that are
                not finite, named.
        """
        norm = self._final_norm() if self._final_norm is not None else None
        total, done = sum(ids.numel() for ids in token_ids), 0
        for place, document in enumerate(documents):
            sample = self._data.open(self._numbers[store][document])
            if not torch.equal(sample.token_ids, token_ids[place]):
                raise ConfigError(
                    f"{sample.path} has other tokens than when its preparation began; start again "
                    "with --overwrite"
                )
            row_bytes = (sample.feature_width + sample.final_width) * sample.dtype.itemsize
            rows = max(1, self._piece_bytes // row_bytes)
            for start in range(0, sample.num_tokens, rows):
                features, final = sample.read(start, min(start + rows, sample.num_tokens))
                if final is None:
                    final = features[:, :0]
                elif norm is not None:
                    weight = next(norm.parameters())
                    final = norm(final.to(weight.device, weight.dtype)).cpu()
                for states in (features, final):
                    if (row := _row_not_finite(states)) is not None:
                        raise ConfigError(
                            f"{sample.path}: the hidden states of token {start + row} are not "
                            "finite; remove the file, or prepare it again with "
                            f"{self._data.trainer}"
                        )
                yield StatePiece(place, start, features, final)
                done += features.shape[0]
                progress(done, total)


def _row_not_finite(states: torch.Tensor) -> int | None:
    # Extremes take NaN along, and cost a fortieth of a look at every number.
    if not states.numel() or torch.stack(torch.aminmax(states)).isfinite().all():
        return None
    return int(torch.isfinite(states).all(-1).int().argmin())
