"""`prepare --target FOLDER --text ...`: anybody's model reads anybody's text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, default_target_layer_ids
from megatron_splitkv.data.prepare import Corpus, Prompt, Sample, Stages, supervised, write_run
from megatron_splitkv.data.target import describe_target, load_target, load_tokenizer
from megatron_splitkv.data.text import Conversation

_HELD_OUT_ONE_IN = 16
_TEXT_PROMPT = 32


def prepare_folder(
    output: Path,
    target: Path,
    samples: Sequence[str | Conversation],
    *,
    sequence_length: int,
    target_layer_ids: tuple[int, ...] | None,
    mask_token_id: int | None,
    dtype: str,
    final_hidden: bool,
    stages: Stages,
) -> dict[str, Any]:
    """Prepare a run folder with a model of a local Hugging Face folder.

    Every sixteenth sample (at least one) goes to the validation store and gives a prompt for
    evaluation. Conversations carry loss on their last message, plain text everywhere.

    Args:
        output: from `open_output`.
        target: the model's folder.
        samples: from `read_samples`.
        sequence_length: longer samples are cut on the right, and counted.
        target_layer_ids: tapped layers; up to five spread ones when None.
        mask_token_id: an unused row of the embedding; when None, the tokenizer's mask token, or the
            first row that the tokenizer does not know.
        dtype: dtype of the features on disk.
        final_hidden: store what the target's head reads, too.
        stages: clock and watcher.

    Returns:
        The summary.

    Raises:
        ConfigError: fewer than two usable samples, or no mask token to be found.
    """
    with stages.stage("load target") as progress:
        model, tokenizer = load_target(target), load_tokenizer(target)
        progress(1, 1)
    info = describe_target(model, target, target.name, _mask_token(model, tokenizer, mask_token_id))
    num_taps = max(1, min(5, info.num_layers - 3))
    taps = target_layer_ids or default_target_layer_ids(info.num_layers, num_taps)
    meta = StoreMeta(info, taps, dtype, final_hidden)
    corpus = _tokenize(tokenizer, samples, sequence_length)
    facts = {"target_parameters": sum(p.numel() for p in model.parameters())}
    return write_run(output, model, target, meta, corpus, stages, facts)


def _mask_token(model: Any, tokenizer: Any, mask_token_id: int | None) -> int:
    if mask_token_id is not None:
        return mask_token_id
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) >= rows:
        raise ConfigError(
            f"the tokenizer uses all {rows} rows of the target's embedding; name an unused one "
            "with --mask-token-id"
        )
    return len(tokenizer)


def _tokenize(
    tokenizer: Any, samples: Sequence[str | Conversation], sequence_length: int
) -> Corpus:
    corpus = Corpus(train=[], valid=[], prompts=[])
    step = min(_HELD_OUT_ONE_IN, len(samples))
    for number, sample in enumerate(samples):
        document, prompt = _encode(tokenizer, sample)
        if document.token_ids.numel() > sequence_length:
            document = Sample(
                document.token_ids[:sequence_length], document.loss_mask[:sequence_length]
            )
            corpus.truncated += 1
        if number % step < step - 1:
            corpus.train.append(document)
            continue
        corpus.valid.append(document)
        ids = document.token_ids[:prompt].tolist()
        corpus.prompts.append(Prompt(f"sample-{number}", tokenizer.decode(ids), ids))
    if not corpus.train or not corpus.valid:
        raise ConfigError(
            f"{len(samples)} samples are too few: at least one to train on and one to hold out"
        )
    return corpus


def _encode(tokenizer: Any, sample: str | Conversation) -> tuple[Sample, int]:
    """The sample's document and the length of its prompt."""
    if isinstance(sample, str):
        ids = torch.tensor(tokenizer(sample)["input_ids"], dtype=torch.long)
        return supervised(ids, 0), min(_TEXT_PROMPT, ids.numel() // 2)
    messages = list(sample.messages)
    if not messages or messages[-1]["role"] != "assistant":
        raise ConfigError("a conversation must end with a message of the role 'assistant'")
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the target's tokenizer has no chat template: give plain text, or JSONL with 'text'"
        )
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not whole.startswith(asked):
        raise ConfigError("the target's chat template does not extend a prompt by its response")
    # Encoded apart, so that no token spans prompt and response: that is what decoding sees.
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    response = tokenizer(whole[len(asked) :], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([*prompt, *response], dtype=torch.long)
    return supervised(ids, len(prompt)), len(prompt)
