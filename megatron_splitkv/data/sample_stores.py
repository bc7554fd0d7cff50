"""The corpus side of preparation: documents stream into token stores, prompts into a file."""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Prompt
from megatron_splitkv.data.length_report import LengthReport
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.store_writer import FeatureStoreWriter

STORES = ("train", "valid")


@dataclass(frozen=True)
class CorpusEntry:
    """What a recipe takes from one place of its text.

    Args:
        store: `train` or `valid`, where the document goes.
        encoded: the document.
        prompt: a prompt for the evaluation.
    """

    store: str = "train"
    encoded: Encoded | None = None
    prompt: Prompt | None = None


@dataclass
class PartCounts:
    """What one store holds."""

    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def add(self, encoded: Encoded) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += encoded.sample.token_ids.numel()
        self.supervised_tokens += int(encoded.sample.loss_mask.sum())


@dataclass
class SampleCounts:
    """What a corpus came to.

    Args:
        parts: of each store.
        prompts: how many there are for the evaluation.
        report: lengths of all documents, and what was cut or left out.
        left_out: which of the documents that came, by their number, are in no store.
    """

    parts: dict[str, PartCounts]
    prompts: int
    report: LengthReport
    left_out: list[int]


def write_sample_stores(
    folder: Path,
    prompts_file: Path,
    target: TargetInfo,
    entries: Iterable[CorpusEntry],
    max_shard_bytes: int,
    frozen: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> SampleCounts:
    """Write the token stores `folder/train` and `folder/valid`, and the prompts.

    Documents lie in the stores in the order in which they come. What a killed process left of it
    is removed first.

    Args:
        folder: made anew.
        prompts_file: one JSON object a line.
        target: whose tokens they are.
        entries: gone through once.
        max_shard_bytes: of the stores.
        frozen: gives the target's embedding and head, if the training store shall hold them; asked
            after the last entry.

    Raises:
        ConfigError: the mask token occurs, or a store would be empty.
    """
    shutil.rmtree(folder, ignore_errors=True)
    meta = StoreMeta.tokens_only(target)
    counts = SampleCounts({name: PartCounts() for name in STORES}, 0, LengthReport(), [])
    masks = samples = 0
    with ExitStack() as stack:
        lines = stack.enter_context(open(prompts_file, "w"))
        writers = {
            name: FeatureStoreWriter(folder / name, meta, max_shard_bytes) for name in STORES
        }
        for entry in entries:
            if entry.prompt is not None:
                lines.write(json.dumps(asdict(entry.prompt)) + "\n")
                counts.prompts += 1
                masks += entry.prompt.token_ids.count(target.mask_token_id)
            if entry.encoded is None:
                continue
            samples += 1
            counts.report.add(entry.encoded)
            if entry.encoded.without_response:
                counts.left_out.append(samples - 1)
                continue
            sample = entry.encoded.sample
            counts.parts[entry.store].add(entry.encoded)
            writers[entry.store].add_document(sample.token_ids, sample.loss_mask)
            masks += int((sample.token_ids == target.mask_token_id).sum())
        if masks:
            raise ConfigError(
                f"mask token {target.mask_token_id} occurs {masks} times in the data; choose an "
                "unused id with --mask-token-id"
            )
        if not all(part.documents for part in counts.parts.values()):
            raise ConfigError(
                f"{counts.report.documents} usable samples of {samples} are too few: at least one "
                "to train on and one to hold out"
            )
        if frozen is not None:
            writers["train"].write_frozen(*frozen())
        for writer in writers.values():
            writer.close()
    return counts
