"""`prepare --from-specforge FOLDER` and `--from-speculators FOLDER`: states that are there already.

The target reads a few tokens of some samples, which tells what the files hold, and gives its
embedding and head; all other hidden states are copied. Documents are imported whole.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded, text_prompt
from megatron_splitkv.data.corpus import Sample
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.held_out import held_out, hold_out
from megatron_splitkv.data.meta import StoreMeta, TargetInfo, check_mask_token
from megatron_splitkv.data.offline_data import OfflineData, OfflineSample
from megatron_splitkv.data.offline_states import OfflineStates
from megatron_splitkv.data.offline_taps import (
    check_vocabulary,
    find_final_norm,
    find_tapped_layers,
)
from megatron_splitkv.data.prepare import PrepareOptions
from megatron_splitkv.data.prepare_job import Json, PrepareJob
from megatron_splitkv.data.prepare_target import (
    Outline,
    PrepareTarget,
    check_weights,
    default_mask_token,
    small_files_checksum,
)
from megatron_splitkv.data.sample_stores import CorpusEntry
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress, target_checksum, target_name
from megatron_splitkv.data.target_states import check_final_hidden


@dataclass
class ImportRecipe:
    """A local model and the hidden states that another trainer took from it.

    Every sixteenth usable sample (at least one) goes to the validation store and gives a prompt for
    evaluation.

    Args:
        target: the folder of the model that the states were made with.
        data: the other trainer's samples.
    """

    target: Path
    data: OfflineData
    _final_normed: bool | None = field(default=None, init=False)

    @cached_property
    def _checksum(self) -> str:
        return target_checksum(self.target)

    @property
    def dtype(self) -> str:
        """The store's dtype that holds the files' numbers as they are."""
        return "bfloat16" if self.data.open(0).dtype == torch.bfloat16 else "float32"

    def options(self) -> Json:
        """What the command says of target and data."""
        return {
            "target": target_name(self.target),
            "imported_from": self.data.trainer,
            "folder": self.data.folder.name,
        }

    def check(self, options: PrepareOptions) -> None:
        """Refuse taps and a mask token that the target cannot have, and rows that do not fit it."""
        outline = Outline.read(self.target)
        check_weights(self.target)
        if options.target_layer_ids is not None:
            outline.taps(options.target_layer_ids)
        if options.mask_token_id is not None:
            check_mask_token(outline.info(target_name(self.target), "", options.mask_token_id))
        first = self.data.open(0)
        if options.final_hidden and not first.final_width:
            raise ConfigError(
                f"{first.path} holds no final hidden states; import without --final-hidden"
            )

    def inputs(self, stages: Stages) -> Json:
        """Checksums of the target's files; of the data, names, sizes and times."""
        with stages.stage("checksums") as progress:
            digest = hashlib.sha256()
            for path in self.data.files():
                status = path.stat()
                name = path.relative_to(self.data.folder).as_posix()
                digest.update(f"{name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
            progress(1, 2)
            inputs = {
                "data files": digest.hexdigest(),
                "target weights": self._checksum,
                "target's other files": small_files_checksum(self.target),
            }
            progress(2, 2)
        return inputs

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        """The target lies where it lies."""
        return {"imported_from": self.data.trainer, "samples": len(self.data)}, {}

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        """By the target's small files and the checksum of its weights."""
        if mask_token_id is None:
            mask_token_id = default_mask_token(target.tokenizer, target.outline.vocab_size)
        return target.outline.info(target_name(self.target), self._checksum, mask_token_id)

    def units(self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json) -> None:
        """The documents are there already."""

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterator[CorpusEntry]:
        """The samples in their order, all of rows like the first one's.

        Raises:
            ConfigError: a sample of another width or dtype, or of tokens that the target does not
                have, named.
        """
        return hold_out(enumerate(self._documents(info, progress)), target.tokenizer)

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        """The layers that the files' rows are of, found by the target itself.

        Raises:
            ConfigError: states of another target, or of other layers than the named ones.
        """

        def find() -> Json:
            if options.final_hidden:
                check_final_hidden(target.model)
            return asdict(find_tapped_layers(target.model, self.data, options.target_layer_ids))

        found = job.once("tapped", find)
        self._final_normed = found["final_normed"]
        return tuple(found["target_layer_ids"])

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> OfflineStates:
        """The files' rows, with final hidden states as the target's head reads them."""
        gone = set(samples["left_out"])
        kept = [number for number in range(len(self.data)) if number not in gone]
        valid = held_out(kept)
        numbers = {"train": sorted(set(kept) - set(valid)), "valid": valid}
        if not meta.final_hidden or self._final_normed:
            return OfflineStates(self.data, numbers)
        return OfflineStates(self.data, numbers, lambda: find_final_norm(target.model))

    def _documents(self, info: TargetInfo, progress: Progress) -> Iterator[Encoded]:
        total = len(self.data)
        first = self.data.open(0)
        for number in range(total):
            sample = self.data.open(number)
            _check_like(first, sample)
            check_vocabulary(sample, info.vocab_size)
            tokens = Sample(sample.token_ids, sample.loss_mask)
            yield Encoded(tokens, _prompt_tokens(sample.loss_mask))
            progress(number + 1, total)


def _check_like(first: OfflineSample, sample: OfflineSample) -> None:
    for name in ("feature_width", "final_width", "dtype"):
        here, there = getattr(sample, name), getattr(first, name)
        if here != there:
            raise ConfigError(
                f"{sample.path} has {name.replace('_', ' ')} {here}, {first.path.name} has "
                f"{there}; import data of one preparation at a time"
            )


def _prompt_tokens(loss_mask: torch.Tensor) -> int:
    """Tokens in front of the last supervised span; of a whole supervised text, a few."""
    begins = loss_mask.clone()
    begins[1:] &= ~loss_mask[:-1]
    spans = begins.nonzero().flatten().tolist()
    last = spans[-1] if spans else 0
    return last or text_prompt(loss_mask.numel())
