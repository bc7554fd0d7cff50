"""From a target and text to a run folder that training and evaluation start from.

    target  : made by the recipe, or a folder that exists; described            process 0
    units   : parts of the text that are tokenised, or prompts that are         work units
              answered by the target, as the recipe asks
    samples : documents stream into token stores, held-out prompts beside them  process 0
    features: shards planned from the documents' lengths                        work units

The folder then holds `train/` and `valid/` (stores), `prompts.jsonl` (held-out prompts for
evaluation), `lengths.png`, `target/` (unless the target lies elsewhere) and `prepare.json`, the
summary. Every process runs this same code; `PrepareJob.once` makes process 0 do a step and the
others wait for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.document_units import Answered, DocumentUnits, unit_file
from megatron_splitkv.data.feature_units import FeatureUnits, StateSource
from megatron_splitkv.data.length_report import LengthReport
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.prepare_job import (
    LENGTHS_FILE,
    PROMPTS_FILE,
    JobFinishedError,
    Json,
    PrepareJob,
)
from megatron_splitkv.data.prepare_target import PrepareTarget, chosen_device
from megatron_splitkv.data.sample_stores import STORES, CorpusEntry, write_sample_stores
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import INDEX_FILE
from megatron_splitkv.data.store_writer import tidy_store
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.verify import RECORDED, recorded_files
from megatron_splitkv.data.work import SharedProgress, Worker, run_units

# Of what an unfinished job holds; raised when another release could not go on with it.
_JOB_FORMAT = 2


@dataclass(frozen=True)
class PrepareOptions:
    """What a run is made like, whatever the recipe.

    Args:
        target_layer_ids: tapped layers; evenly spread ones when None.
        mask_token_id: an unused row of the embedding; the recipe's choice when None.
        dtype: dtype of the features on disk.
        final_hidden: store what the target's head reads, too.
        tokens_only: store no states of the target: it will run in the training job.
        max_shard_bytes: of the stores, and so of a work unit.
        batch_tokens: padded tokens of one forward pass.
        device: see `prepare_target.chosen_device`.
    """

    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    dtype: str = "float32"
    final_hidden: bool = False
    tokens_only: bool = False
    max_shard_bytes: int = 1 << 29
    batch_tokens: int = 4096
    device: str = "auto"


class Recipe(Protocol):
    """Where a run's target and text come from."""

    @property
    def target(self) -> Path | None:
        """A folder or GGUF file; None if `begin` makes the run's own target folder."""

    def options(self) -> Json:
        """What makes this recipe another one, known at once."""

    def check(self, options: PrepareOptions) -> None:
        """Refuse bad input that can be seen without any work."""

    def inputs(self, stages: Stages) -> Json:
        """Checksums of what it reads."""

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        """Make `target_folder` if the recipe makes its target, and look through the text.

        Returns:
            Facts for the summary, and what only `units` has to know.
        """

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        """What a store has to know about the target."""

    def units(
        self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json
    ) -> DocumentUnits | None:
        """Documents that are made first, in work units; None without any."""

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterable[CorpusEntry]:
        """The corpus in order, from the units' documents; it is made as it is gone through."""

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        """The tapped layers."""

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> StateSource:
        """Where the hidden states come from; `samples` is what `_samples` returned."""


def prepare(
    recipe: Recipe,
    output: Path,
    options: PrepareOptions,
    *,
    overwrite: bool = False,
    worker: Worker | None = None,
    stages: Stages | None = None,
) -> Json | None:
    """Prepare a run folder, or go on where an earlier call with the same arguments was killed.

    Args:
        recipe: gives target and text.
        output: the run folder.
        options: what the run is made like.
        overwrite: replace what the folder holds of an earlier run, which stays until the new one is
            whole.
        worker: this process; the only one when None.
        stages: clock and watcher.

    Returns:
        The summary, as written to `prepare.json`; None from processes that do not lead.

    Raises:
        ConfigError: bad input, a folder of another command, or a full disk.
    """
    worker, stages = worker or Worker(), stages or Stages()
    recipe.check(options)
    device = chosen_device(options.device, worker.local_rank)
    kind = device.partition(":")[0]
    asked = recipe.options() | asdict(options) | {"device": kind, "format": _JOB_FORMAT}
    job = PrepareJob(output, asked, worker, makes_target=recipe.target is None)
    with job.opened(lambda: recipe.inputs(stages), overwrite):
        if worker.leads and job.finished:
            stages.say(f"{output} is prepared already: nothing to do")
        elif worker.leads:
            summary = {} if job.ready else _run(recipe, job, options, device, stages)
            job.publish(lambda: summary | {"seconds": stages.seconds})
        elif not job.ready:
            _follow(recipe, job, options, device, stages)
    return job.summary if worker.leads else None


def _follow(
    recipe: Recipe, job: PrepareJob, options: PrepareOptions, device: str, stages: Stages
) -> None:
    """This process's share; what it looks for may be gone when the others are faster."""
    try:
        _run(recipe, job, options, device, stages)
    except (JobFinishedError, ConfigError, OSError):
        if not job.ready:
            raise


def _run(
    recipe: Recipe, job: PrepareJob, options: PrepareOptions, device: str, stages: Stages
) -> Json:
    """All steps of one process; returns the summary where it leads, but for the seconds."""

    def describe() -> Json:
        facts, plan = recipe.begin(job.folder / "target", stages)
        info = recipe.describe(target, options.mask_token_id)
        return {"info": asdict(info), "facts": facts, "plan": plan}

    target = PrepareTarget(recipe.target or job.folder / "target", device, stages)
    described = job.once("target", describe)
    eos = tuple(described["info"]["eos_token_ids"])
    info = TargetInfo(**described["info"] | {"eos_token_ids": eos})
    meta = StoreMeta.tokens_only(info)
    if not options.tokens_only:
        taps = recipe.taps(target, options, job)
        meta = StoreMeta(info, taps, options.dtype, options.final_hidden)

    units = recipe.units(target, info, described["facts"], described["plan"])
    if units is not None and not job.record("samples").exists():
        folder = job.folder / units.stage
        folder.mkdir(exist_ok=True)
        _share(
            units.stage,
            job,
            stages,
            units.sizes,
            lambda unit: unit_file(folder, unit).exists(),
            lambda unit, progress: units.write(folder, unit, progress),
        )
    samples = job.once(
        "samples",
        lambda: _samples(recipe, job, target, info, described["facts"], units, options, stages),
    )
    if not options.tokens_only:
        source = recipe.states(target, meta, options, samples)
        _features(job, target, meta, source, options, stages)
    if not job.worker.leads:
        return {}
    if options.tokens_only:
        for name in STORES:
            if (job.folder / "samples" / name).exists():
                os.replace(job.folder / "samples" / name, job.folder / name)
    return _summary(job, recipe.target, meta, described["facts"], samples)


def _share(
    name: str,
    job: PrepareJob,
    stages: Stages,
    sizes: Sequence[int],
    finished: Callable[[int], bool],
    write: Callable[[int, Progress], None],
) -> None:
    """One stage of work units."""
    with stages.stage(name) as progress:
        shared = SharedProgress(sizes, lambda unit: job.finished or finished(unit), progress)
        if shared.units_finished:
            stages.say(f"{name}: {shared.units_finished} of {len(sizes)} units are there already")
        run_units(
            job.worker,
            len(sizes),
            shared.finished,
            lambda unit: write(
                unit, lambda done, total: shared.inside(sizes[unit] * done // total)
            ),
        )


def _samples(
    recipe: Recipe,
    job: PrepareJob,
    target: PrepareTarget,
    info: TargetInfo,
    facts: Json,
    units: DocumentUnits | None,
    options: PrepareOptions,
    stages: Stages,
) -> Json:
    """Write the token stores and the prompts; returns what they hold."""
    answered = {"answers": 0, "answers_cut": 0, "answers_empty": 0}

    def counted() -> Iterator[Answered]:
        for document in units.read(job.folder / units.stage) if units is not None else ():
            answered["answers"] += 1
            answered["answers_cut"] += document.cut
            answered["answers_empty"] += document.encoded is None
            yield document

    with stages.stage("samples") as progress:
        counts = write_sample_stores(
            job.folder / "samples",
            job.folder / PROMPTS_FILE,
            info,
            recipe.entries(target, info, facts, counted(), progress),
            options.max_shard_bytes,
            target.frozen if options.tokens_only else None,
        )
        counts.report.draw(job.folder / LENGTHS_FILE)
    return asdict(counts) | {"answered": answered if isinstance(units, AnswerUnits) else {}}


def _features(
    job: PrepareJob,
    target: PrepareTarget,
    meta: StoreMeta,
    source: StateSource,
    options: PrepareOptions,
    stages: Stages,
) -> None:
    """The hidden states of both stores' documents."""
    closed = [name for name in STORES if (job.folder / name / INDEX_FILE).exists()]
    if job.worker.leads:
        for name in closed:
            tidy_store(job.folder / name)
    if len(closed) == len(STORES):
        return
    # The finished stores take over what these hold, under checksums of their own.
    verify = "full" if job.worker.leads else "size"
    units = FeatureUnits(
        job.folder,
        {name: FeatureStore(job.folder / "samples" / name, verify) for name in STORES},
        meta,
        options.max_shard_bytes,
        source,
    )
    _share("features", job, stages, units.sizes, units.finished, units.write)
    if job.worker.leads:
        units.close(target.frozen)


def _summary(
    job: PrepareJob, target: Path | None, meta: StoreMeta, facts: Json, samples: Json
) -> Json:
    report = LengthReport(**samples["report"])
    return {
        "target": meta.target.id,
        "target_folder": os.path.relpath(target or job.output / "target", job.output),
        "target_checksum": meta.target.checksum,
        "target_layer_ids": list(meta.target_layer_ids),
        "dtype": meta.dtype,
        **({"final_hidden": True} if meta.final_hidden else {}),
        **({} if meta.has_features else {"tokens_only": True}),
        "mask_token_id": meta.target.mask_token_id,
        **facts,
        **samples["answered"],
        **{
            name: counts | {"bytes": sum(f.stat().st_size for f in (job.folder / name).iterdir())}
            for name, counts in samples["parts"].items()
        },
        "prompts": samples["prompts"],
        "truncated": report.truncated,
        "truncated_tokens": report.truncated_tokens,
        "without_response": report.without_response,
        "rewritten": report.rewritten,
        "lengths": report.lines(),
        RECORDED: recorded_files(job.folder, (PROMPTS_FILE, LENGTHS_FILE, "target")),
    }
