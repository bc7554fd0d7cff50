"""From a sample as a user wrote it to token ids, and which of them carry loss.

Plain text is supervised everywhere. A conversation goes through the tokenizer's chat template and
is supervised on what the assistant says. Where that is in the rendered text, the template itself
tells with its ``{% generation %}`` marks; without them a response is what the template adds to the
prompt that it makes of the messages before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.corpus import Sample, supervised
from megatron_splitkv.data.text import Conversation, RawSample

MIN_RESPONSE_TOKENS = 2

_TEXT_PROMPT = 32
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Characters [start, end) of a rendered text.
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A tokenised sample, and what became of it on the way.

    Args:
        sample: token ids and loss mask, cut on the right to the sequence length.
        prompt_tokens: tokens in front of the last response that begins inside the sample; of a
            plain text the first 32, or half of a shorter one.
        truncated: tokens that were cut off.
        rewritten: responses that the chat template shows otherwise than the target says them, or
            not at all. They are context without loss.
    """

    sample: Sample
    prompt_tokens: int = 0
    truncated: int = 0
    rewritten: int = 0

    @property
    def without_response(self) -> bool:
        """Truncation left fewer than two supervised tokens: nothing to train on."""
        return int(self.sample.loss_mask.sum()) < MIN_RESPONSE_TOKENS


def encode_samples(
    tokenizer: Any, raws: Sequence[RawSample], sequence_length: int, *, vocab_size: int
) -> list[Encoded]:
    """Tokenise samples and mark their supervised tokens.

    Prompts and responses are encoded apart, so that no token spans two of them: that is what
    decoding sees. A response reaches to the end of its turn, the template's closing marks included.
    What is encoded goes to the tokenizer in one call, which a fast one shares over its threads.

    Args:
        tokenizer: the target's, from `target.load_tokenizer`.
        raws: from `text.read_samples`.
        sequence_length: a longer document is cut on the right.
        vocab_size: rows of the target's embedding.

    Returns:
        The documents; see `Encoded.without_response`, which the caller leaves out and counts.

    Raises:
        ConfigError: naming the sample's origin: a conversation that does not end with the
            assistant, an empty response, fewer than two supervised tokens before truncation, a
            token outside the vocabulary, no chat template, or a template that refuses the messages
            or hides the last response.
    """
    pieces = [_pieces(tokenizer, raw) for raw in raws]
    plain = [isinstance(raw.content, str) for raw in raws]
    # Of plain texts, which alone begin and end as the tokenizer wants it, and of conversations.
    tokens = {
        special: iter(
            _tokens(
                tokenizer,
                [
                    piece
                    for own, each in zip(pieces, plain, strict=True)
                    if each is special
                    for piece in own
                ],
                special=special,
            )
        )
        for special in (True, False)
    }
    return [
        _encoded(raw, list(islice(tokens[each], len(own))), sequence_length, vocab_size)
        for raw, own, each in zip(raws, pieces, plain, strict=True)
    ]


def encode_sample(
    tokenizer: Any, raw: RawSample, sequence_length: int, *, vocab_size: int
) -> Encoded:
    """Tokenise one sample, see `encode_samples`."""
    return encode_samples(tokenizer, [raw], sequence_length, vocab_size=vocab_size)[0]


def text_prompt(num_tokens: int) -> int:
    """Tokens of a plain text that stand for its prompt: the first 32, or half of a shorter one."""
    return min(_TEXT_PROMPT, num_tokens // 2)


def _pieces(tokenizer: Any, raw: RawSample) -> list[str]:
    """What is encoded apart: a plain text, or a conversation's contexts and responses in turn."""
    if isinstance(raw.content, str):
        return [raw.content]
    text, spans = _rendered(tokenizer, raw.content, raw.origin)
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def _encoded(
    raw: RawSample, pieces: list[torch.Tensor], sequence_length: int, vocab_size: int
) -> Encoded:
    """The document of a sample whose pieces are tokenised."""
    if isinstance(raw.content, str):
        whole = supervised(pieces[0], 0)
        starts, rewritten = [text_prompt(whole.token_ids.numel())], 0
    else:
        whole, starts = _supervise(pieces)
        said = sum(message["role"] == "assistant" for message in raw.content.messages)
        rewritten = max(0, said - len(starts))
    _check_tokens(whole, raw.origin, vocab_size)
    sample = Sample(whole.token_ids[:sequence_length], whole.loss_mask[:sequence_length])
    kept = sample.token_ids.numel()
    return Encoded(
        sample,
        prompt_tokens=max((start for start in starts if start < kept), default=kept),
        truncated=whole.token_ids.numel() - kept,
        rewritten=rewritten,
    )


def encode_prompt(tokenizer: Any, conversation: Conversation, origin: str) -> torch.Tensor:
    """Token ids that the target continues with its answer to a conversation.

    Shape:
        int64 ``[n]``.

    Raises:
        ConfigError: no chat template, or one that refuses the messages.
    """
    text = _render(tokenizer, conversation, origin, answer_next=True)
    return _tokens(tokenizer, [text])[0]


def prompts_of(conversation: Conversation) -> list[Conversation]:
    """What was said before each answer: the prompts to answer, to make a conversation anew.

    A message of the assistant with nothing before it answers nothing and gives no prompt. A
    conversation that ends with somebody else gives itself as the last prompt.
    """
    messages = conversation.messages
    ends = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if messages and messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    return [replace(conversation, messages=messages[:end]) for end in ends]


def _check_tokens(whole: Sample, origin: str, vocab_size: int) -> None:
    response = int(whole.loss_mask.sum())
    if response < MIN_RESPONSE_TOKENS:
        raise ConfigError(
            f"{origin}: a response of {response} token(s) is shorter than {MIN_RESPONSE_TOKENS} "
            "tokens, there is nothing to draft; remove it"
        )
    check_vocabulary(whole.token_ids, origin, vocab_size)


def check_vocabulary(token_ids: torch.Tensor, origin: str, vocab_size: int) -> None:
    """Refuse tokens that the target has no embedding for.

    Raises:
        ConfigError: naming the sample and the largest token.
    """
    largest = int(token_ids.max())
    if largest >= vocab_size:
        raise ConfigError(
            f"{origin}: token {largest} is outside the target's vocabulary of {vocab_size}; use "
            "the tokenizer that belongs to the target"
        )


def _tokens(tokenizer: Any, texts: Sequence[str], special: bool = False) -> list[torch.Tensor]:
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
    )
    return [torch.tensor(ids, dtype=torch.long) for ids in encoded["input_ids"]]


def _supervise(pieces: list[torch.Tensor]) -> tuple[Sample, list[int]]:
    """A sample that is supervised on every second piece, and the token where each starts."""
    lengths = np.array([piece.numel() for piece in pieces])
    # Context and responses take turns.
    mask = np.repeat(np.arange(len(pieces)) % 2 == 1, lengths)
    starts = lengths.cumsum()[:-1:2].tolist()
    return Sample(torch.cat(pieces), torch.from_numpy(mask)), starts


def _rendered(tokenizer: Any, conversation: Conversation, origin: str) -> tuple[str, list[Span]]:
    """The text that the template makes, and where in it the assistant speaks, in order."""
    check_responses(conversation, origin)
    text = _render(tokenizer, conversation, origin)
    template = tokenizer.get_chat_template(tools=_tools(conversation))
    if _GENERATION_MARK.search(template):
        spans = _marked_spans(tokenizer, template, conversation)
    else:
        spans = _prefix_spans(tokenizer, conversation, text)
    if not spans:
        raise ConfigError(
            f"{origin}: the target's chat template does not show the last response behind its "
            "prompt; mark responses with {% generation %} in the template"
        )
    return text, spans


def check_responses(conversation: Conversation, origin: str) -> None:
    """Refuse a conversation without a response to learn from; tokenises nothing.

    Raises:
        ConfigError: naming the sample: it does not end with the assistant, or answers nothing.
    """
    messages = conversation.messages
    if not messages or messages[-1]["role"] != "assistant":
        raise ConfigError(f"{origin}: a conversation must end with a message of the assistant")
    if len(messages) == 1:
        raise ConfigError(f"{origin}: the response has no prompt; put a user's message before it")
    for number, message in enumerate(messages, start=1):
        says = str(message["content"]).strip() or message.get("tool_calls")
        if message["role"] == "assistant" and not says:
            raise ConfigError(f"{origin}: message {number} is an empty response; remove it")


def _marked_spans(tokenizer: Any, template: str, conversation: Conversation) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    _, marks = render_jinja_template(
        [list(conversation.messages)],
        tools=_tools(conversation),
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return [(start, end) for start, end in marks[0] if start < end]


def _prefix_spans(tokenizer: Any, conversation: Conversation, text: str) -> list[Span]:
    """Spans of the responses that the text shows as the target says them; none without the last."""
    spans: list[Span] = []
    prompts = prompts_of(conversation)
    for prompt in prompts:
        span = _prefix_span(tokenizer, conversation, text, prompt)
        if span is not None and (not spans or spans[-1][1] <= span[0]):
            spans.append(span)
        elif prompt is prompts[-1]:
            return []
    return spans


def _prefix_span(
    tokenizer: Any, conversation: Conversation, text: str, prompt: Conversation
) -> Span | None:
    """Where a text shows the response to a prompt, if it shows it as the target says it.

    A template may show a turn in one way while it is the last one and in another later: Qwen3
    drops what was thought. Then the words of the message must stand behind the prompt.
    """
    turn = len(prompt.messages) + 1
    spoken = replace(conversation, messages=conversation.messages[:turn])
    try:
        asked = _render(tokenizer, prompt, "", answer_next=True)
        through = _render(tokenizer, spoken, "")
        if text.startswith(through) and through.startswith(asked):
            return len(asked), len(through)
        before = asked if text.startswith(asked) else _render(tokenizer, prompt, "")
    except ConfigError:  # A template may refuse the part, having accepted the whole.
        return None
    content = str(spoken.messages[-1]["content"])
    words, indent = content.strip(), len(content) - len(content.lstrip())
    if not words or words not in through or not text.startswith(before):
        return None
    said = through[through.rindex(words) :]
    start = text.rfind(said, len(before), len(asked) + indent + len(said))
    if start < 0:
        return None
    return (len(asked) if before == asked else start), start + len(said)


def _render(
    tokenizer: Any, conversation: Conversation, origin: str, *, answer_next: bool = False
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{origin}: the target's tokenizer has no chat template for a conversation; give plain "
            "text, or JSONL with 'text'"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=_tools(conversation),
                add_generation_prompt=answer_next,
                tokenize=False,
            )
        )
    except Exception as error:  # A template is somebody's program and may raise anything.
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{origin}: the target's chat template refuses the conversation: {reason}"
        ) from error


def _tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    return list(conversation.tools) or None
