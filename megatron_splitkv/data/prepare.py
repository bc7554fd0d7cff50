"""From a target and text to a run folder that training and evaluation start from.

The folder holds `train/` and `valid/` (feature stores), `prompts.jsonl` (held-out prompts for
evaluation), `target/` (unless the target is a folder elsewhere) and `prepare.json`, the summary.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.store import INDEX_FILE
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from megatron_splitkv.data.target import (
    Progress,
    check_final_hidden,
    document_states,
    silent,
)

SUMMARY_FILE = "prepare.json"
PROMPTS_FILE = "prompts.jsonl"


@dataclass(frozen=True)
class Sample:
    """One tokenised document before it has features.

    Shape:
        token_ids: int64 ``[n]``. loss_mask: bool ``[n]``, True on supervised tokens.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt for evaluation."""

    id: str
    text: str
    token_ids: list[int]


@dataclass
class Corpus:
    """What a recipe takes from its text: three parts that share no document.

    Args:
        train: samples of the training store.
        valid: samples of the validation store.
        prompts: prompts of the evaluation.
        truncated: samples that were cut to the sequence length.
    """

    train: list[Sample]
    valid: list[Sample]
    prompts: list[Prompt]
    truncated: int = 0


@dataclass
class Stages:
    """Tells a watcher which stage runs and how far it is, and keeps the wall seconds of each.

    Args:
        watch: called with a stage's name when it starts; returns the stage's `Progress`.
    """

    watch: Callable[[str], Progress] = lambda name: silent
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Run one stage."""
        start = time.perf_counter()
        yield self.watch(name)
        self.seconds[name] = round(time.perf_counter() - start, 2)


def supervised(token_ids: torch.Tensor, first: int) -> Sample:
    """A sample whose tokens from position `first` on carry loss."""
    return Sample(token_ids, torch.arange(token_ids.numel()) >= first)


def open_output(output: str | os.PathLike[str], overwrite: bool) -> Path:
    """Make the run folder, before any expensive step.

    Raises:
        ConfigError: it already holds a prepared run and `overwrite` is not set.
    """
    path = Path(output)
    stores = (path / "train", path / "valid")
    if any((store / INDEX_FILE).exists() for store in stores):
        if not overwrite:
            raise ConfigError(
                f"{path} already holds a prepared run; choose another --output or add --overwrite"
            )
        for store in stores:
            shutil.rmtree(store, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_run(
    output: Path,
    model: Any,
    target_folder: Path,
    meta: StoreMeta,
    corpus: Corpus,
    stages: Stages,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Features of a corpus into stores, its prompts beside them, and the summary.

    Args:
        output: from `open_output`.
        model: the loaded target.
        target_folder: where it lies, for evaluation.
        meta: target, tapped layers and dtype of both stores.
        corpus: samples and prompts.
        stages: clock and watcher.
        facts: what the recipe wants to say in the summary.

    Returns:
        The summary, as written to `prepare.json`.

    Raises:
        ConfigError: the mask token occurs in the corpus, or the target's final hidden states are
            wanted and do not say what it says.
    """
    check_mask_unused(meta.target, corpus)
    if meta.final_hidden:
        check_final_hidden(model)
    sizes = {}
    for name, samples in (("train", corpus.train), ("valid", corpus.valid)):
        with (
            stages.stage(f"{name} features") as progress,
            FeatureStoreWriter(output / name, meta) as writer,
        ):
            if name == "train":
                writer.write_frozen(
                    model.get_input_embeddings().weight, model.get_output_embeddings().weight
                )
            states = document_states(
                model,
                [sample.token_ids for sample in samples],
                meta.target_layer_ids,
                progress=progress,
            )
            for index, features, final in states:
                sample = samples[index]
                writer.add_document(
                    sample.token_ids,
                    sample.loss_mask,
                    features,
                    final if meta.final_hidden else None,
                )
        sizes[name] = _size(output / name, samples)
    with open(output / PROMPTS_FILE, "w") as lines:
        for prompt in corpus.prompts:
            lines.write(json.dumps(prompt.__dict__) + "\n")
    summary = {
        "target": meta.target.id,
        "target_folder": os.path.relpath(target_folder, output),
        "target_checksum": meta.target.checksum,
        "target_layer_ids": list(meta.target_layer_ids),
        "dtype": meta.dtype,
        **({"final_hidden": True} if meta.final_hidden else {}),
        "mask_token_id": meta.target.mask_token_id,
        **facts,
        **sizes,
        "prompts": len(corpus.prompts),
        "truncated": corpus.truncated,
        "seconds": stages.seconds,
    }
    (output / SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def check_mask_unused(target: TargetInfo, corpus: Corpus) -> None:
    """Refuse a mask token that means something in the data.

    Raises:
        ConfigError: naming the token and how often it occurs.
    """
    mask = target.mask_token_id
    count = sum(int((s.token_ids == mask).sum()) for s in (*corpus.train, *corpus.valid))
    count += sum(prompt.token_ids.count(mask) for prompt in corpus.prompts)
    if count:
        raise ConfigError(
            f"mask token {mask} occurs {count} times in the data; choose an unused id with "
            "--mask-token-id"
        )


def _size(store: Path, samples: Sequence[Sample]) -> dict[str, int]:
    return {
        "documents": len(samples),
        "tokens": sum(sample.token_ids.numel() for sample in samples),
        "supervised_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "bytes": sum(file.stat().st_size for file in store.iterdir()),
    }
