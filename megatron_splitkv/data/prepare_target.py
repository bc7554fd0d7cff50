"""The target of one `splitkv prepare`: described without its weights, loaded when it is needed."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import TargetInfo, check_target_layer_ids, spread_target_layer_ids
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import (
    import_transformers,
    load_target,
    load_target_config,
    load_tokenizer,
)

_WEIGHTS_INDEX = "model.safetensors.index.json"
# Everything beside the weights that decides which tokens a target reads and where it stops.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class Outline:
    """What a target says of itself without its weights.

    Args:
        num_layers: decoder layers.
        hidden_size: d.
        vocab_size: rows of the embedding.
        eos_token_ids: ids that end a response.
        pad_token_id: id that fills a batch, if there is one.
        num_positions: tokens of the longest text that it can read; None with rotary positions,
            which have no end.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_positions: int | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a target's configuration, without its weights.

        Args:
            path: a Hugging Face folder or a GGUF file.

        Raises:
            ConfigError: transformers cannot read it.
        """
        config = load_target_config(path)
        text = config.get_text_config(decoder=True)
        eos = text.eos_token_id
        if (path / "generation_config.json").is_file():
            generation = import_transformers().GenerationConfig.from_pretrained(path)
            eos = eos if generation.eos_token_id is None else generation.eos_token_id
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_theta"))
        return cls(
            text.num_hidden_layers,
            text.hidden_size,
            text.vocab_size,
            eos_ids,
            text.pad_token_id,
            None if rotary else getattr(text, "max_position_embeddings", None),
        )

    def taps(self, target_layer_ids: tuple[int, ...] | None, most: int = 5) -> tuple[int, ...]:
        """The tapped layers: those that are named, or up to `most` spread ones.

        Raises:
            ConfigError: a layer that the target does not have.
        """
        if target_layer_ids is None:
            return spread_target_layer_ids(self.num_layers, most)
        check_target_layer_ids(target_layer_ids, self.num_layers)
        return target_layer_ids

    def info(self, target_id: str, checksum: str, mask_token_id: int) -> TargetInfo:
        """What a store has to know about the target."""
        return TargetInfo(
            id=target_id,
            checksum=checksum,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            mask_token_id=mask_token_id,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
        )


class PrepareTarget:
    """A target that loads its tokenizer and its weights when they are first asked for.

    Args:
        path: a Hugging Face folder or a GGUF file.
        device: where it shall run.
        stages: told when the weights are loaded.
    """

    def __init__(self, path: Path, device: str, stages: Stages) -> None:
        self.path = path
        self._device = device
        self._stages = stages

    @cached_property
    def outline(self) -> Outline:
        """What it says of itself without its weights."""
        return Outline.read(self.path)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return load_tokenizer(self.path)

    @cached_property
    def model(self) -> Any:
        """The model.

        Raises:
            ConfigError: its embedding has another number of rows than its configuration says.
        """
        with self._stages.stage("load target") as progress:
            model = load_target(self.path, device=self._device)
            progress(1, 1)
        rows = model.get_input_embeddings().weight.shape[0]
        if rows != self.outline.vocab_size:
            raise ConfigError(
                f"target {self.path} has {rows} rows in its embedding, its configuration "
                f"says vocab_size {self.outline.vocab_size}; save it again so that both agree"
            )
        return model

    def frozen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Its embedding and head, which drafters share: ``[vocab_size, d]`` each."""
        return (
            self.model.get_input_embeddings().weight.cpu(),
            self.model.get_output_embeddings().weight.cpu(),
        )


def default_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's mask token, or the first row of the embedding that it does not know.

    Raises:
        ConfigError: it knows them all.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) >= vocab_size:
        raise ConfigError(
            f"the tokenizer uses all {vocab_size} rows of the target's embedding; name an unused "
            "one with --mask-token-id"
        )
    return len(tokenizer)


def check_weights(path: Path) -> None:
    """Refuse weight files that are missing or cut short, which loading would find after hours.

    Headers of safetensors are compared with the sizes of their files, no weights are read. (Of a
    GGUF file `Outline.read` does as much.)

    Args:
        path: a Hugging Face folder or a GGUF file.

    Raises:
        ConfigError: naming the file.
    """
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"weight file {file} is damaged ({error}); take a complete copy"
            ) from error
    index = path / _WEIGHTS_INDEX
    if not index.is_file():
        return
    try:
        named = {*json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged ({error}); take a complete copy") from error
    if missing := sorted(name for name in named if not (path / name).is_file()):
        raise ConfigError(
            f"target {path} lacks {len(missing)} of its {len(named)} weight files, {missing[0]} "
            "among them; take a complete copy"
        )


def small_files_checksum(folder: Path) -> str:
    """SHA-256 over the files of a target's folder that are not weights."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _SMALL_FILES for file in folder.glob(pattern)}):
        digest.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def chosen_device(device: str, local_rank: int) -> str:
    """The device of one process: of several GPUs each process on a node takes its own.

    Args:
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: of this process on its node.

    Raises:
        ConfigError: a GPU that is not there.
    """
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda":
        device = f"cuda:{local_rank % max(1, gpus)}"
    if device != "cpu" and device not in [f"cuda:{i}" for i in range(gpus)]:
        raise ConfigError(f"--device {device} is not there: torch sees {gpus} GPUs; choose cpu")
    return device
