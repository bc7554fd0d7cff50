"""Target, training stores and prompts of the quality study, made once for all its points.

All stores hold the same samples, cut at different lengths. In a causal target the features of a
cut sample are the first rows of the uncut one's: one pass of the target serves every store.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_splitkv.bench.quality_shape import QualityShape
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, default_target_layer_ids
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.store_index import INDEX_FILE
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from megatron_splitkv.data.target import (
    Progress,
    describe_target,
    import_transformers,
    load_target,
    silent,
)
from megatron_splitkv.data.target_states import document_states
from megatron_splitkv.data.text import TextFile
from megatron_splitkv.data.tiny_target import (
    MASK_TOKEN_ID,
    TinyTargetConfig,
    save_tiny_target,
    train_tiny_target,
)

SUMMARY_FILE, PROMPTS_FILE, TARGET_FOLDER = "data.json", "prompts.json", "target"
_TARGET_FACTS = "target.json"
_TRAINING_TOKENS = 2048  # of the target's step
_CACHED_TOKENS = 1 << 17  # of all samples that are spoken together


def store_folder(folder: Path, context: int) -> Path:
    """Where the samples cut to `context` tokens lie."""
    return folder / f"samples-{context}"


def prepare_quality(
    shape: QualityShape, folder: Path, read_text: Callable[[], list[TextFile]], stages: Stages
) -> dict[str, Any]:
    """Make what is not there yet; a finished part is not made again.

    Args:
        shape: of the study.
        folder: for the target, the stores and the prompts.
        read_text: gives real text, some of it held out.
        stages: clock and watcher.

    Returns:
        What a reader wants to know about target and samples.

    Raises:
        ConfigError: too little text.
    """
    if (folder / SUMMARY_FILE).is_file():
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
        return summary
    target_folder, text = folder / TARGET_FOLDER, read_text()
    turns = shape.length // (shape.real + shape.spoken)
    training = text_rows(text, False, shape.documents, turns * shape.real, shape.seed)
    held_out = text_rows(text, True, shape.held_out, turns * shape.real, shape.seed)
    if not (folder / _TARGET_FACTS).is_file():
        with stages.stage("train target") as progress:
            facts = _train_target(shape, target_folder, text, progress)
        _write(folder / _TARGET_FACTS, facts)
    facts = json.loads((folder / _TARGET_FACTS).read_text())
    model = load_target(target_folder, torch.float32)
    with stages.stage("target speaks") as progress:
        rows = torch.from_numpy(np.concatenate([training, held_out]))
        samples = speak(model, rows, shape.real, shape.spoken, progress=progress)
    with stages.stage("features") as progress:
        _write_stores(shape, folder, model, samples[: shape.documents], progress)
    _write(folder / PROMPTS_FILE, samples[shape.documents :].tolist())
    _write(folder / SUMMARY_FILE, facts)  # last: all else is whole
    return facts


def truncation(lengths: np.ndarray, context: int) -> dict[str, float]:
    """How much a limit takes away.

    Args:
        lengths: int64 ``[documents]``, tokens of the uncut samples.
        context: the limit.

    Returns:
        ``truncated``: share of the samples that are cut; ``kept``: share of all tokens that stay.
    """
    return {
        "truncated": float((lengths > context).mean()),
        "kept": float(np.minimum(lengths, context).sum() / lengths.sum()),
    }


def text_rows(
    text: list[TextFile], held_out: bool, count: int, length: int, seed: int
) -> np.ndarray:
    """Pieces of text from random places, none overlapping another.

    Args:
        text: files; shorter ones follow one another in a piece.
        held_out: which files.
        count: pieces.
        length: bytes of each.
        seed: of the places.

    Returns:
        int64 ``[count, length]``.
    """
    content = "\n".join(file.text for file in text if file.held_out == held_out).encode()
    places = len(content) // length
    if places < count:
        raise ConfigError(
            f"{len(content)} bytes of text give {places} pieces of {length} bytes, needs {count}; "
            "take shorter contexts, or fewer steps or prompts"
        )
    picked = np.random.default_rng(seed).permutation(places)[:count]
    rows = np.frombuffer(content, dtype=np.uint8)[: places * length].reshape(places, length)
    return rows[picked].astype(np.int64)


@torch.inference_mode()
def speak(
    model: Any, rows: torch.Tensor, real: int, spoken: int, progress: Progress = silent
) -> torch.Tensor:
    """Lay text out in turns and let the target answer each greedily.

    Args:
        model: the target.
        rows: text, ``[documents, turns * real]``.
        real: tokens of text in a turn.
        spoken: tokens of the target in a turn.
        progress: told the tokens done.

    Returns:
        int64 ``[documents, turns * (real + spoken)]``.
    """
    documents, turns = rows.shape[0], rows.shape[1] // real
    samples = torch.empty(documents, turns, real + spoken, dtype=torch.int64)
    samples[:, :, :real] = rows.view(documents, turns, real)
    samples = samples.view(documents, -1)
    done = 0
    for batch in samples.split(max(1, _CACHED_TOKENS // samples.shape[1])):
        cache = import_transformers().DynamicCache(config=model.config)
        at = 0
        while at < samples.shape[1]:
            new = batch[:, at : at + real]
            at += real
            for _ in range(spoken):
                # By position, as in `evaluate.cached_target`: the cache's keyword is renamed.
                logits = model(new, None, None, cache, use_cache=True, logits_to_keep=1).logits
                new = logits[:, -1:].argmax(dim=-1)
                batch[:, at] = new[:, 0]
                at += 1
            if at < samples.shape[1]:  # the last one's keys go into the cache as well
                model(new, None, None, cache, use_cache=True, logits_to_keep=1)
            progress(done + batch.shape[0] * at, samples.numel())
        done += batch.numel()
    return samples


def supervised_rows(shape: QualityShape, context: int) -> torch.Tensor:
    """The loss mask of every sample cut to `context`: True where the target spoke."""
    turn = torch.arange(shape.real + shape.spoken) >= shape.real
    return turn.repeat(context // turn.numel())


def _train_target(
    shape: QualityShape, folder: Path, text: list[TextFile], progress: Progress
) -> dict[str, Any]:
    config = TinyTargetConfig(
        steps=shape.target_steps,
        window=shape.length,
        batch_size=max(1, _TRAINING_TOKENS // shape.length),
        seed=shape.seed,
    )
    content = "\n".join(file.text for file in text if not file.held_out).encode()
    model, loss = train_tiny_target(content, config, progress)
    save_tiny_target(model, folder)
    return {
        "target": "byte-level Qwen3, trained here on the given text",
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "window": config.window,
        "steps": config.steps,
        "loss": round(loss, 4),
    }


def _write_stores(
    shape: QualityShape, folder: Path, model: Any, samples: torch.Tensor, progress: Progress
) -> None:
    target = describe_target(model, folder / TARGET_FOLDER, "tiny", MASK_TOKEN_ID)
    meta = StoreMeta(target, default_target_layer_ids(target.num_layers, 2))
    with ExitStack() as stack:
        writers = {}
        for context in shape.contexts:
            store = store_folder(folder, context)
            # Of a start that ended before the summary was written.
            (store / INDEX_FILE).unlink(missing_ok=True)
            writers[context] = stack.enter_context(FeatureStoreWriter(store, meta))
            writers[context].write_frozen(
                model.get_input_embeddings().weight, model.get_output_embeddings().weight
            )
        masks = {context: supervised_rows(shape, context) for context in shape.contexts}
        pieces = document_states(
            model,
            list(samples),
            meta.target_layer_ids,
            batch_tokens=max(4096, shape.length),  # one piece a sample
            progress=progress,
        )
        for piece in pieces:
            sample = samples[piece.document]
            for context, writer in writers.items():
                writer.add_document(sample[:context], masks[context], piece.features[:context])


def _write(path: Path, content: Any) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(content) + "\n")
    aside.replace(path)
