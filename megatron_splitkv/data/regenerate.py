"""Conversations made anew: every message of the assistant is replaced by the target's own answer.

The turns of a conversation are answered in order, each behind the target's own earlier answers; the
conversations of a unit are answered together, turn by turn. The document is what the target read
and said at the last turn, token by token. An earlier answer carries loss if its very tokens stand
in that document; where the template or the tokenizer writes it otherwise, it is context only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.chat import (
    MIN_RESPONSE_TOKENS,
    Encoded,
    check_vocabulary,
    encode_prompt,
    encode_sample,
    prompts_of,
)
from megatron_splitkv.data.corpus import Sample
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.text import Conversation, RawSample

_UNIT = 64


@dataclass(frozen=True)
class Regeneration:
    """How the target answers.

    Args:
        max_new_tokens: longest answer.
        temperature: 0 takes the likeliest token, more samples.
        seed: of the samples.
        batch_size: conversations that are answered together.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 16


@dataclass
class _Talk:
    """A conversation on its way through its turns."""

    number: int
    raw: RawSample
    messages: tuple[dict[str, Any], ...]
    turns: list[int]  # Messages in front of each answer.
    asked: list[torch.Tensor]
    said: list[torch.Tensor]


class Regenerator:
    """Answers the conversations of a corpus.

    Args:
        model: from `load_target`.
        tokenizer: the target's.
        options: how it answers.
        sequence_length: longest document.
        vocab_size: rows of the target's embedding.
        stop_token_ids: ids that end an answer.
        mask_token_id: no document may hold it; an answer breaks off in front of it.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        tokenizer: Any,
        options: Regeneration,
        *,
        sequence_length: int,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        mask_token_id: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._stop = set(stop_token_ids)
        self._mask = mask_token_id

    def units(self, read: Callable[[], Iterable[RawSample]], count: int) -> AnswerUnits:
        """The work units of `count` samples that `read` reads from the first on."""
        cursor = _Cursor(read)
        return AnswerUnits(
            count,
            _UNIT,
            lambda first, last, progress: self.answer(cursor.samples(first, last), first, progress),
        )

    def answer(
        self, samples: Sequence[RawSample], first: int, progress: Progress
    ) -> list[Answered]:
        """Documents of the target's own answers; plain text stays what it is.

        Args:
            samples: consecutive samples of the corpus.
            first: number of the first of them in the corpus, part of the key of its draws.
            progress: told the answered turns.

        Raises:
            ConfigError: naming the sample, if it cannot be encoded.
        """
        talks = [
            self._talk(first + i, raw, raw.content)
            for i, raw in enumerate(samples)
            if isinstance(raw.content, Conversation)
        ]
        rounds = max((len(talk.turns) for talk in talks), default=0)
        for turn in range(rounds):
            self._answer_turn([talk for talk in talks if turn < len(talk.turns)], turn)
            progress(turn + 1, rounds)
        answered = {talk.number: self._document(talk) for talk in talks}
        return [
            answered[first + i]
            if first + i in answered
            else Answered(
                encode_sample(
                    self._tokenizer, raw, self._sequence_length, vocab_size=self._vocab_size
                )
            )
            for i, raw in enumerate(samples)
        ]

    def _talk(self, number: int, raw: RawSample, conversation: Conversation) -> _Talk:
        # What a tool returned belongs to a call that the target may not make: the turns before.
        tools = [i for i, m in enumerate(conversation.messages) if m["role"] == "tool"]
        end = min(tools, default=len(conversation.messages))
        turns = [len(p.messages) for p in prompts_of(conversation) if len(p.messages) <= end]
        return _Talk(number, raw, conversation.messages, turns, [], [])

    def _answer_turn(self, talks: list[_Talk], turn: int) -> None:
        """Answer one turn of each conversation; those that end here lose their later turns."""
        going = []
        for talk in talks:
            ids = self._prompt(talk, turn)
            if ids.numel() + MIN_RESPONSE_TOKENS > self._sequence_length:
                del talk.turns[turn:]
            else:
                talk.asked.append(ids)
                going.append(talk)
        answers = respond(
            self._model(),
            [talk.asked[turn] for talk in going],
            self._options.max_new_tokens,
            batch_size=self._options.batch_size,
            stop_token_ids=self._stop | {self._mask},
            temperature=self._options.temperature,
            sample_keys=[(self._options.seed, talk.number, turn) for talk in going],
        )
        for talk, whole in zip(going, answers, strict=True):
            answer = whole[: -int(whole[-1] == self._mask) or None]
            talk.said.append(answer)
            if answer.numel() < MIN_RESPONSE_TOKENS or not self._ended(answer):
                del talk.turns[turn + 1 :]
                continue
            content = self._tokenizer.decode(answer, skip_special_tokens=True)
            end = talk.turns[turn]
            message = {"role": "assistant", "content": content}
            talk.messages = (*talk.messages[:end], message, *talk.messages[end + 1 :])

    def _prompt(self, talk: _Talk, turn: int) -> torch.Tensor:
        assert isinstance(talk.raw.content, Conversation)
        before = replace(talk.raw.content, messages=talk.messages[: talk.turns[turn]])
        ids = encode_prompt(self._tokenizer, before, talk.raw.origin)
        check_vocabulary(ids, talk.raw.origin, self._vocab_size)
        return ids

    def _ended(self, answer: torch.Tensor) -> bool:
        return int(answer[-1]) in self._stop

    def _document(self, talk: _Talk) -> Answered:
        while talk.said and talk.said[-1].numel() < MIN_RESPONSE_TOKENS:
            talk.said.pop()
            talk.asked.pop()
        if not talk.said:
            return Answered(None)
        whole = torch.cat([talk.asked[-1], talk.said[-1]])
        mask = torch.zeros_like(whole, dtype=torch.bool)
        verbatim = 0
        for asked, said in zip(talk.asked, talk.said, strict=True):
            through = torch.cat([asked, said])
            if torch.equal(whole[: through.numel()], through):
                mask[asked.numel() : through.numel()] = True
                verbatim += 1
        length = min(whole.numel(), self._sequence_length)
        encoded = Encoded(
            Sample(whole[:length], mask[:length]),
            prompt_tokens=talk.asked[-1].numel(),
            truncated=whole.numel() - length,
            rewritten=len(talk.said) - verbatim,
        )
        return Answered(encoded, cut=not self._ended(talk.said[-1]))


class _Cursor:
    """Consecutive samples of a stream that is read from its start only when one lies behind."""

    def __init__(self, read: Callable[[], Iterable[RawSample]]) -> None:
        self._read = read
        self._stream: Iterator[RawSample] = iter(())
        self._at: int | None = None

    def samples(self, first: int, last: int) -> list[RawSample]:
        """The samples ``first`` to ``last``."""
        if self._at is None or first < self._at:
            self._stream, self._at = iter(self._read()), 0
        skipped = first - self._at
        self._at = last
        return list(islice(self._stream, skipped, skipped + last - first))
