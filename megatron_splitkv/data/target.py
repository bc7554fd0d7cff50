"""The target model: loading it, and what a store has to know about it.

Targets are Hugging Face language models in local folders, or GGUF files; nothing is fetched. Where
the text model is nested in a multimodal one, it is text that the whole is given. Transformers is
imported when a target is first touched, so that training from a store does not need it.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import TargetInfo
from megatron_splitkv.data.shard import file_sha256

# Fields of config.json, of nested ones too, that say nothing about what is computed.
_NO_COMPUTATION = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
}

# Called with (items done, items in all) while a stage runs.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """The `Progress` of callers who do not watch."""


def load_target(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Load a language model from local files, frozen and in eval mode.

    Args:
        path: a Hugging Face folder with ``config.json`` and weights, or a ``.gguf`` file, whose
            weights are unpacked.
        dtype: dtype of the weights; when None as saved, and float32 for a GGUF file.
        device: where it runs.

    Raises:
        ConfigError: no such target, one that transformers cannot load, or one without all of its
            weights.
    """
    transformers = import_transformers()
    config = load_target_config(path)
    folder, options = _source(path)
    if is_gguf(path):
        dtype = dtype or torch.float32
        if hasattr(transformers, "GgufConfig"):
            # Otherwise transformers may keep the weights packed, depending on what is installed.
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, loading = _auto_class(config, path).from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            dtype=dtype or "auto",
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"target {path} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"target {path} lacks {len(missing)} of its weights, {missing[0]} among them; take a "
            "complete copy"
        )
    return model.to(device).eval().requires_grad_(False)


def load_target_config(path: str | os.PathLike[str]) -> Any:
    """Read a target's configuration without its weights; `get_text_config` is the text model's.

    Args:
        path: as in `load_target`.

    Raises:
        ConfigError: no such target, or one that transformers does not know as a language model.
    """
    folder, options = _source(path)
    try:
        config = import_transformers().AutoConfig.from_pretrained(
            folder, local_files_only=True, **options
        )
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise ConfigError(f"target {path} cannot be loaded: {_first_line(error)}") from error
    _auto_class(config, path)
    return config


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load the tokenizer of a local target.

    Args:
        path: as in `load_target`.

    Raises:
        ConfigError: there is none that transformers can load.
    """
    # A folder may hold a tokenizer alone.
    folder, options = _source(path) if is_gguf(path) else (Path(path), {})
    try:
        return import_transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, **options
        )
    except (OSError, ValueError, KeyError) as error:
        reason = _first_line(error)
        raise ConfigError(f"the tokenizer of {path} cannot be loaded: {reason}") from error


def import_transformers() -> Any:
    """Transformers, told to stay off the network.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "a target model needs transformers; install megatron-splitkv[target]"
        ) from error
    return transformers


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a target's path names a GGUF file rather than a folder."""
    return Path(path).suffix == ".gguf"


def target_checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 over what decides a target's computation: its weights and its configuration.

    Equal weights in equal files count as equal; of config.json, the order and what only says how
    the model was saved or is run do not count.

    Args:
        path: as in `load_target`.

    Returns:
        Of a GGUF file, its own; of a folder, that of its weight files' names and checksums, and of
        its config.json.

    Raises:
        ConfigError: there are no weights, or config.json cannot be read.
    """
    folder = Path(path)
    if is_gguf(folder) and folder.is_file():
        return file_sha256(folder)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ConfigError(f"target {path} has no weight files (*.safetensors)")
    digest = hashlib.sha256(_computation(folder / "config.json").encode() + b"\n")
    for file in files:
        digest.update(f"{file.name}:{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def target_name(path: str | os.PathLike[str]) -> str:
    """How a store names a target, for people.

    Args:
        path: as in `load_target`.

    Returns:
        ``ORG/NAME@REVISION`` of a folder in the Hugging Face cache, which is called by its revision
        alone; else the last part of the path.
    """
    target = Path(os.path.abspath(path))
    repository = target.parent.parent.name
    if target.parent.name == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/')}@{target.name}"
    return target.name


def describe_target(
    model: Any, path: str | os.PathLike[str], target_id: str, mask_token_id: int
) -> TargetInfo:
    """What a store has to know about a loaded target.

    Args:
        model: from `load_target`.
        path: where it was loaded from (its weights are checksummed).
        target_id: name of the target, for people.
        mask_token_id: the unused embedding row that will stand for "to be drafted".
    """
    config = model.config.get_text_config(decoder=True)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TargetInfo(
        id=target_id,
        checksum=target_checksum(path),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        mask_token_id=mask_token_id,
        eos_token_ids=eos_ids,
        pad_token_id=config.pad_token_id,
    )


def _computation(file: Path) -> str:
    """What config.json says about what is computed, in one form only."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in _NO_COMPUTATION}
        return value

    try:
        return json.dumps(without(json.loads(file.read_text())), sort_keys=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {_first_line(error)}") from error


def _auto_class(config: Any, path: str | os.PathLike[str]) -> Any:
    """The class of transformers that loads a language model of this configuration."""
    transformers = import_transformers()
    # A class of text alone, where there is one, is smaller than that with a tower for images.
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise ConfigError(
        f"target {path} cannot be loaded: transformers has no language model for "
        f"{type(config).__name__}"
    )


def _source(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Folder and options by which transformers finds a target."""
    target = Path(path)
    if is_gguf(target):
        if not target.is_file():
            raise ConfigError(f"target {target} does not exist")
        if find_spec("gguf") is None:
            raise ConfigError("a GGUF target needs gguf; install megatron-splitkv[target]")
        return target.parent, {"gguf_file": target.name}
    if not (target / "config.json").is_file():
        hint = "; name one of its .gguf files" if any(target.glob("*.gguf")) else ""
        raise ConfigError(
            f"target {target} is not a Hugging Face folder: it has no config.json{hint}"
        )
    return target, {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
