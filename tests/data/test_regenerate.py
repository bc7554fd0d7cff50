"""The target answers conversations anew, and only what it really said carries loss."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.data import regenerate
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.regenerate import Regeneration, Regenerator
from megatron_splitkv.data.target import load_target, silent
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.text import Conversation, RawSample
from megatron_splitkv.data.tiny_target import EOS_TOKEN_ID, MASK_TOKEN_ID, byte_tokenizer

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %};{% endfor %}" + PROMPT
)
# Earlier answers are shown in capitals: nothing that the target said.
SHOUTS = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")


def talk(*contents: str) -> RawSample:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents))
    return RawSample("x.jsonl line 1", Conversation(messages))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Prompts of each call; the target answers by a table."""
    calls: list[list[str]] = []

    def scripted(model: Any, prompts: Sequence[torch.Tensor], *_: Any, **options: Any) -> Any:
        calls.append([bytes(p.tolist()).decode().replace("\0", "<|end|>") for p in shown(prompts)])
        return [torch.tensor(ANSWERS[text.split("<user>")[-1]]) for text in calls[-1]]

    monkeypatch.setattr(regenerate, "respond", scripted)
    return calls


def shown(prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.where(p == EOS_TOKEN_ID, 0, p) for p in prompts]


def said(text: str, *, ended: bool = True) -> list[int]:
    return [*text.encode(), *([EOS_TOKEN_ID] if ended else [])]


ANSWERS = {
    "one?;<assistant>": said("Uno"),
    "two?;<assistant>": said("dos"),
    "long?;<assistant>": said("never done", ended=False),
    "mute?;<assistant>": said(""),
    "mask?;<assistant>": [*said("so", ended=False), MASK_TOKEN_ID],
}
# The questions, too, are shown in capitals.
ANSWERS |= {text.upper().replace("ASSISTANT", "assistant"): ids for text, ids in ANSWERS.items()}


def regenerator(template: str, length: int = 1000, **options: Any) -> Regenerator:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Regenerator(
        lambda: None,
        tokenizer,
        Regeneration(**options),
        sequence_length=length,
        vocab_size=258,
        stop_token_ids=[EOS_TOKEN_ID],
        mask_token_id=MASK_TOKEN_ID,
    )


def pieces(answered: Answered) -> str:
    """The document with its supervised parts in braces."""
    assert answered.encoded is not None
    sample, text, inside = answered.encoded.sample, "", False
    for token, loss in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        text += ("{" if loss and not inside else "}" if inside and not loss else "") + (
            "|" if token == EOS_TOKEN_ID else chr(token)
        )
        inside = loss
    return text + "}" * inside


def test_every_turn_is_answered_behind_the_target_s_own_answers(asked: list[list[str]]) -> None:
    samples = [talk("one?", "given", "two?", "given too"), talk("two?", "given")]
    first, second = regenerator(PLAIN).answer(samples, 0, silent)
    assert asked == [
        ["<user>one?;<assistant>", "<user>two?;<assistant>"],
        ["<user>one?;<assistant>Uno<|end|>;<user>two?;<assistant>"],
    ]
    assert pieces(first) == "<user>one?;<assistant>{Uno|};<user>two?;<assistant>{dos|}"
    assert pieces(second) == "<user>two?;<assistant>{dos|}"
    assert first.encoded is not None
    assert first.encoded.prompt_tokens == len("<user>one?;<assistant>Uno|;<user>two?;<assistant>")
    assert (first.encoded.rewritten, first.cut) == (0, False)


def test_rewritten_answers_are_counted(asked: list[list[str]]) -> None:
    (answered,) = regenerator(SHOUTS).answer([talk("one?", "", "two?", "")], 0, silent)
    assert asked[1] == ["<user>ONE?;<assistant>UNO<|end|>;<user>TWO?;<assistant>"]
    assert pieces(answered) == "<user>ONE?;<assistant>UNO|;<user>TWO?;<assistant>{dos|}"
    assert answered.encoded is not None
    assert answered.encoded.rewritten == 1


@pytest.mark.parametrize(
    ("contents", "document", "cut"),
    [
        # An answer without an end: no later question can follow it.
        (("long?", "", "two?", ""), "<user>long?;<assistant>{never done}", True),
        # Nor behind the mask token, which no document may hold.
        (("mask?", "", "two?", ""), "<user>mask?;<assistant>{so}", True),
        # Nothing said: the conversation ends with the answer before.
        (("one?", "", "mute?", ""), "<user>one?;<assistant>{Uno|}", False),
        # A question that nobody answered yet is answered, too.
        (("one?", "", "two?"), "<user>one?;<assistant>{Uno|};<user>two?;<assistant>{dos|}", False),
    ],
)
def test_where_a_conversation_ends(
    asked: list[list[str]], contents: tuple[str, ...], document: str, cut: bool
) -> None:
    (answered,) = regenerator(PLAIN).answer([talk(*contents)], 0, silent)
    assert pieces(answered) == document
    assert answered.cut == cut


def test_a_silent_target_leaves_no_document(asked: list[list[str]]) -> None:
    assert regenerator(PLAIN).answer([talk("mute?", "x")], 0, silent) == [Answered(None)]


def test_what_a_tool_returned_is_not_guessed(asked: list[list[str]]) -> None:
    raw = talk("one?", "call", "two?", "given")
    assert isinstance(raw.content, Conversation)
    messages = (*raw.content.messages[:2], {"role": "tool", "content": "42"})
    messages = (*messages, *raw.content.messages[2:])
    (answered,) = regenerator(PLAIN).answer([RawSample("x", Conversation(messages))], 0, silent)
    assert pieces(answered) == "<user>one?;<assistant>{Uno|}"


def test_the_sequence_length_holds(asked: list[list[str]]) -> None:
    prompt = len("<user>one?;<assistant>")
    (answered,) = regenerator(PLAIN, prompt + 2).answer([talk("one?", "", "two?", "")], 0, silent)
    assert pieces(answered) == "<user>one?;<assistant>{Un}"
    assert answered.encoded is not None
    assert answered.encoded.truncated == 2
    assert len(asked) == 2  # The second question found no room.
    assert asked[1] == []
    assert regenerator(PLAIN, prompt + 1).answer([talk("one?", "")], 0, silent) == [Answered(None)]


def test_plain_text_stays_what_it_is(asked: list[list[str]]) -> None:
    samples = [RawSample("a.txt", "some text"), talk("one?", "given")]
    text, answered = regenerator(PLAIN).answer(samples, 0, silent)
    assert pieces(text) == "{some text}"
    assert pieces(answered) == "<user>one?;<assistant>{Uno|}"


def test_units_read_the_stream_once_and_again_only_to_go_back(asked: list[list[str]]) -> None:
    samples = [talk("one?" if i % 3 else "two?", "") for i in range(150)]
    opened: list[int] = []

    def read() -> list[RawSample]:
        opened.append(1)
        return samples

    units = regenerator(PLAIN).units(read, len(samples))
    assert units.sizes == [64, 64, 22]
    expected = [answer(units, 0), answer(units, 1), answer(units, 2)]
    assert len(opened) == 1
    assert [len(part) for part in expected] == [64, 64, 22]
    assert answer(units, 1) == expected[1]
    assert len(opened) == 2
    assert expected[2][0] == pieces(regenerator(PLAIN).answer([samples[128]], 128, silent)[0])


def answer(units: Any, unit: int) -> list[str]:
    first = unit * units.unit
    return [pieces(a) for a in units.answer(first, min(first + units.unit, units.prompts), silent)]


def test_units_survive_their_files(asked: list[list[str]], tmp_path: Path) -> None:
    samples = [talk("one?", "", "two?", ""), talk("mute?", ""), talk("long?", ""), talk("two?", "")]
    units = regenerator(SHOUTS).units(lambda: samples, len(samples))
    units.write(tmp_path, 0, silent)
    direct, read = units.answer(0, 4, silent), list(units.read(tmp_path))
    assert [a.cut for a in read] == [a.cut for a in direct] == [False, False, True, False]
    assert read[1] == Answered(None)
    for there, here in zip(direct, read, strict=True):
        if there.encoded is None:
            assert here.encoded is None
            continue
        assert here.encoded is not None
        assert torch.equal(here.encoded.sample.token_ids, there.encoded.sample.token_ids)
        assert torch.equal(here.encoded.sample.loss_mask, there.encoded.sample.loss_mask)
        for name in ("prompt_tokens", "truncated", "rewritten"):
            assert getattr(here.encoded, name) == getattr(there.encoded, name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_belongs_to_its_conversation_and_turn(
    target_folder: Path, temperature: float
) -> None:
    tokenizer, model = byte_tokenizer(), load_target(target_folder)
    tokenizer.chat_template = PLAIN
    options = Regeneration(max_new_tokens=6, temperature=temperature, seed=4, batch_size=2)

    def one(seed_of: Callable[[int], int]) -> list[list[int]]:
        regenerator = Regenerator(
            lambda: model,
            tokenizer,
            options,
            sequence_length=500,
            vocab_size=258,
            stop_token_ids=[EOS_TOKEN_ID],
            mask_token_id=MASK_TOKEN_ID,
        )
        answers = [regenerator.answer([talk("why?", "")], seed_of(i), silent)[0] for i in range(3)]
        return [a.encoded.sample.token_ids.tolist() for a in answers if a.encoded is not None]

    alone = one(lambda i: i)
    together = [
        a.encoded.sample.token_ids.tolist()
        for a in Regenerator(
            lambda: model,
            tokenizer,
            options,
            sequence_length=500,
            vocab_size=258,
            stop_token_ids=[EOS_TOKEN_ID],
            mask_token_id=MASK_TOKEN_ID,
        ).answer([talk("why?", "")] * 3, 0, silent)
        if a.encoded is not None
    ]
    assert together == alone
    assert (alone[0] == alone[1]) == (temperature == 0)
    ids = torch.tensor(list(b"<user>why?;<assistant>"))
    (expected,) = respond(
        model,
        [ids],
        6,
        batch_size=1,
        stop_token_ids=[EOS_TOKEN_ID],
        temperature=temperature,
        sample_keys=[(4, 1, 0)],
    )
    assert alone[1] == [*ids.tolist(), *expected.tolist()]
