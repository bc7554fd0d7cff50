"""`prepare --target FOLDER --text ...`: anybody's model reads anybody's text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded, check_responses, encode_samples
from megatron_splitkv.data.document_units import Answered, DocumentUnits
from megatron_splitkv.data.feature_units import TargetStates
from megatron_splitkv.data.held_out import hold_out
from megatron_splitkv.data.meta import StoreMeta, TargetInfo, check_mask_token
from megatron_splitkv.data.prepare import PrepareOptions
from megatron_splitkv.data.prepare_job import Json, PrepareJob
from megatron_splitkv.data.prepare_target import (
    Outline,
    PrepareTarget,
    check_weights,
    default_mask_token,
    small_files_checksum,
)
from megatron_splitkv.data.regenerate import Regeneration, Regenerator
from megatron_splitkv.data.rope import check_answer_length, check_document_length
from megatron_splitkv.data.sample_stores import CorpusEntry
from megatron_splitkv.data.shard import file_sha256
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import (
    Progress,
    load_target_config,
    target_checksum,
    target_name,
)
from megatron_splitkv.data.text import Conversation, Place, read_from, read_samples
from megatron_splitkv.data.text_units import TextPart, TextUnits, in_parts


@dataclass
class FolderRecipe:
    """A local model and a user's files.

    Every sixteenth usable sample (at least one) goes to the validation store and gives a prompt
    for evaluation.

    Args:
        target: a Hugging Face folder or a GGUF file.
        text: plain text and JSON lines, see `read_samples`.
        sequence_length: longer samples are cut on the right, and counted.
        regeneration: replace the assistant's messages by the target's own answers.
    """

    target: Path
    text: Sequence[Path]
    sequence_length: int = 4096
    regeneration: Regeneration | None = None

    @cached_property
    def _checksum(self) -> str:
        return target_checksum(self.target)

    def options(self) -> Json:
        """What the command says of target and text."""
        return {
            "target": target_name(self.target),
            "text": [path.name for path in self.text],
            "sequence_length": self.sequence_length,
            "regenerate": self.regeneration is not None,
        } | ({} if self.regeneration is None else asdict(self.regeneration))

    def check(self, options: PrepareOptions) -> None:
        """Refuse taps, a mask token and lengths that the target cannot have, unreadable files."""
        outline = Outline.read(self.target)
        check_weights(self.target)
        answer = 0 if self.regeneration is None else self.regeneration.max_new_tokens
        if outline.num_positions is not None and outline.num_positions < answer + 2:
            raise ConfigError(
                f"target {self.target} reads at most {outline.num_positions} tokens, and "
                f"--max-new-tokens {answer} leaves no room for a question; give at most "
                f"--max-new-tokens {outline.num_positions // 2}"
            )
        if outline.num_positions is not None and (
            self.sequence_length + answer > outline.num_positions
        ):
            raise ConfigError(
                f"target {self.target} reads at most {outline.num_positions} tokens; give "
                f"--sequence-length {outline.num_positions - answer}"
                f"{f' (and --max-new-tokens {answer})' if answer else ''} or less"
            )
        config = load_target_config(self.target)
        if answer:
            check_answer_length(config, self.sequence_length, answer)
        if not options.tokens_only:
            check_document_length(config, self.sequence_length, options.batch_tokens)
            outline.taps(options.target_layer_ids)
        if options.mask_token_id is not None:
            check_mask_token(outline.info(target_name(self.target), "", options.mask_token_id))
        read_samples(self.text)

    def inputs(self, stages: Stages) -> Json:
        """Checksums of the target's files and of each text."""
        with stages.stage("checksums") as progress:
            total = len(self.text) + 1
            inputs: Json = {"target weights": self._checksum}
            progress(1, total)
            inputs["target's other files"] = small_files_checksum(self.target)
            for number, path in enumerate(self.text, start=1):
                inputs[f"text {number} {path.name}"] = file_sha256(path)
                progress(number + 1, total)
        return inputs

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        """Read the text through once: a broken line shall not be found after hours."""
        parts: list[Json] = []
        with stages.stage("read text") as progress:
            samples = conversations = 0
            for part, raws in in_parts(read_from(self.text)):
                parts.append(asdict(part))
                samples += len(raws)
                for raw in raws:
                    if isinstance(raw.content, Conversation):
                        conversations += 1
                        if self.regeneration is None:
                            check_responses(raw.content, raw.origin)
            progress(samples, samples)
        if self.regeneration is not None and not conversations:
            raise ConfigError("--regenerate answers conversations, and the text holds none")
        return {"samples": samples}, {"parts": parts}

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        """From the target's small files; without a mask token, one that the tokenizer leaves."""
        if mask_token_id is None:
            mask_token_id = default_mask_token(target.tokenizer, target.outline.vocab_size)
        return target.outline.info(target_name(self.target), self._checksum, mask_token_id)

    def units(
        self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json
    ) -> DocumentUnits:
        """The text's parts, or the conversations' turns if they shall be answered anew."""
        if self.regeneration is None:
            parts = [TextPart(Place(**part["place"]), part["samples"]) for part in plan["parts"]]
            return TextUnits(
                self.text,
                parts,
                lambda raws: encode_samples(
                    target.tokenizer, raws, self.sequence_length, vocab_size=info.vocab_size
                ),
            )
        regenerator = Regenerator(
            lambda: target.model,
            target.tokenizer,
            self.regeneration,
            sequence_length=self.sequence_length,
            vocab_size=info.vocab_size,
            stop_token_ids=info.eos_token_ids,
            mask_token_id=info.mask_token_id,
        )
        return regenerator.units(lambda: read_samples(self.text), facts["samples"])

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterator[CorpusEntry]:
        """The samples in the order of the files; of fewer than sixteen the last is held out."""
        encoded = (document.encoded for document in documents)
        numbered = _counted(encoded, facts["samples"], progress)
        return hold_out(
            ((number, document) for number, document in numbered if document is not None),
            target.tokenizer,
        )

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        """The named layers, or up to five spread ones."""
        return target.outline.taps(options.target_layer_ids)

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> TargetStates:
        """The target's own."""
        return TargetStates(lambda: target.model, meta, options.batch_tokens)


def _counted(
    encoded: Iterable[Encoded | None], total: int, progress: Progress
) -> Iterator[tuple[int, Encoded | None]]:
    for number, document in enumerate(encoded):
        yield number, document
        progress(number + 1, total)
