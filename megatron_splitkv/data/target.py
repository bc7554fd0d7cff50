"""The target model: loading it, tapping its layers, letting it speak greedily.

Targets are Hugging Face causal language models in local folders; nothing is fetched. Transformers
is imported when a target is first touched, so that training from a store does not need it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import TargetInfo, check_target_layer_ids
from megatron_splitkv.data.shard import file_sha256

# Called with (items done, items in all) while a stage runs.
Progress = Callable[[int, int], None]


_SOFTCAP = "final_logit_softcapping"


def silent(done: int, total: int) -> None:
    """The `Progress` of callers who do not watch."""


def load_target(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Any:
    """Load a causal language model from a local folder, frozen and in eval mode.

    Args:
        folder: a Hugging Face folder with ``config.json`` and weights.
        dtype: dtype of the weights; as saved when None.

    Raises:
        ConfigError: no such folder, or one that transformers cannot load.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"target {path} is not a Hugging Face folder: it has no config.json")
    transformers = import_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype or "auto", attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"target {path} cannot be loaded: {first_line}") from error
    return model.eval().requires_grad_(False)


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Load the tokenizer of a local target folder."""
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"the tokenizer of {folder} cannot be loaded: {first_line}") from error


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


def target_checksum(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over a target folder's weight files: equal for equal weights in equal files.

    Raises:
        ConfigError: the folder holds no weights.
    """
    digest = hashlib.sha256()
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))
    if not files:
        raise ConfigError(f"target {folder} has no weight files (*.safetensors)")
    for file in files:
        digest.update(f"{file.name}:{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def describe_target(
    model: Any, folder: str | os.PathLike[str], target_id: str, mask_token_id: int
) -> TargetInfo:
    """What a store has to know about a loaded target.

    Args:
        model: from `load_target`.
        folder: where it was loaded from (its weights are checksummed).
        target_id: name of the target, for people.
        mask_token_id: the unused embedding row that will stand for "to be drafted".
    """
    config = model.config.get_text_config()
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TargetInfo(
        id=target_id,
        checksum=target_checksum(folder),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        mask_token_id=mask_token_id,
        eos_token_ids=eos_ids,
        pad_token_id=config.pad_token_id,
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """The target's decoder layers, wherever its architecture nests them.

    Raises:
        ConfigError: no list of that many layers is found.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        is_layers = isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] == "layers"
        if is_layers and len(module) == num_layers:
            return module
    raise ConfigError(
        f"{type(model).__name__} has no module list 'layers' of {num_layers} decoder layers to tap"
    )


@contextmanager
def tapped_layers(
    model: Any, target_layer_ids: Sequence[int]
) -> Iterator[Callable[[], torch.Tensor]]:
    """Hook the tapped layers only, so that no other layer's output outlives its use.

    Args:
        model: from `load_target`.
        target_layer_ids: 0-based layer outputs.

    Yields:
        ``collect()``: features of the forward pass that ran last, ``[batch, length, C * d]``.
    """
    layers = decoder_layers(model)
    check_target_layer_ids(target_layer_ids, len(layers))
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer_id: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in target_layer_ids]

    def collect() -> torch.Tensor:
        return torch.cat([outputs.pop(i) for i in target_layer_ids], dim=-1)

    try:
        yield collect
    finally:
        for handle in handles:
            handle.remove()


def document_features(
    model: Any,
    documents: Sequence[torch.Tensor],
    target_layer_ids: Sequence[int],
    *,
    batch_tokens: int = 4096,
    progress: Progress = silent,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Tapped hidden states of documents, see `document_states`.

    Yields:
        ``(index of the document, features [n_i, C * d])``, longest documents first.
    """
    states = document_states(
        model, documents, target_layer_ids, batch_tokens=batch_tokens, progress=progress
    )
    for i, features, _ in states:
        yield i, features


def document_states(
    model: Any,
    documents: Sequence[torch.Tensor],
    target_layer_ids: Sequence[int],
    *,
    batch_tokens: int = 4096,
    progress: Progress = silent,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Tapped and final hidden states of documents, batched by similar length.

    Documents of a batch are padded on the right: in a causal model that changes no real row, so
    no mask is needed. The output head never runs.

    Args:
        model: from `load_target`.
        documents: token ids, ``[n_i]`` each.
        target_layer_ids: 0-based layer outputs.
        batch_tokens: padded tokens of one forward pass (at least one document).
        progress: told the tokens done.

    Yields:
        ``(index of the document, features [n_i, C * d], final hidden states [n_i, d])``, longest
        documents first. The final hidden states are the decoder's output behind its final norm,
        which the head reads (see `check_final_hidden`).
    """
    lengths = [int(document.numel()) for document in documents]
    order = sorted(range(len(documents)), key=lambda i: (-lengths[i], i))
    total, done, at = sum(lengths), 0, 0
    with tapped_layers(model, target_layer_ids) as collect:
        while at < len(order):
            batch = order[at : at + max(1, batch_tokens // max(1, lengths[order[at]]))]
            ids = nn.utils.rnn.pad_sequence([documents[i] for i in batch], batch_first=True)
            with torch.inference_mode():
                final = model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)[0]
                features, final = collect().cpu(), final.cpu()
            for row, i in enumerate(batch):
                yield i, features[row, : lengths[i]], final[row, : lengths[i]]
                done += lengths[i]
            at += len(batch)
            progress(done, total)


@torch.inference_mode()
def check_final_hidden(model: Any) -> None:
    """Refuse a target whose logits are more than the head of its decoder's output.

    Some scale their logits: trained against the head of its final hidden states, a drafter would
    learn another distribution than the target's. Capped ones (``final_logit_softcapping``) are
    known to drafters.

    Args:
        model: from `load_target`.

    Raises:
        ConfigError: naming the target's class.
    """
    ids = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    bare = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False)[0])
    bare, cap = bare.float(), getattr(model.config.get_text_config(), _SOFTCAP, None)
    expected = bare if cap is None else cap * torch.tanh(bare / cap)
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise ConfigError(
            f"{type(model).__name__} changes its logits: its distribution is not that of its head "
            "applied to its final hidden states; prepare it without --final-hidden"
        )


def greedy_responses(
    model: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    *,
    batch_size: int,
    stop_token_ids: Iterable[int] = (),
    progress: Progress = silent,
) -> list[torch.Tensor]:
    """The target's own greedy continuation of each prompt.

    Prompts of a batch are padded on the left and masked.

    Args:
        model: from `load_target`.
        prompts: token ids, ``[n_i]`` each.
        max_new_tokens: longest response.
        batch_size: prompts decoded together.
        stop_token_ids: ids that end a response (kept as its last token).
        progress: told the prompts done.

    Returns:
        Responses without their prompts, in the order of `prompts`.
    """
    transformers = import_transformers()
    stop = sorted(stop_token_ids)
    # Padding is masked and cut away again: any id does, an ending one lets finished rows idle.
    pad = stop[0] if stop else 0
    generation = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad,
        bos_token_id=pad,
    )
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].numel(), i))
    responses: dict[int, torch.Tensor] = {}
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        width = max(prompts[i].numel() for i in batch)
        ids = torch.full((len(batch), width), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            ids[row, width - prompts[i].numel() :] = prompts[i]
            mask[row, width - prompts[i].numel() :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids.to(model.device), attention_mask=mask, generation_config=generation
            )
        for row, i in enumerate(batch):
            responses[i] = _until_stop(output[row, width:].cpu(), stop)
        progress(len(responses), len(order))
    return [responses[i] for i in range(len(prompts))]


def _until_stop(response: torch.Tensor, stop: Sequence[int]) -> torch.Tensor:
    if not stop:
        return response.clone()
    hits = torch.isin(response, torch.tensor(stop)).nonzero()
    return (response[: int(hits[0]) + 1] if len(hits) else response).clone()
