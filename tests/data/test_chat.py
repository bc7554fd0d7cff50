"""Loss falls on what the assistant really says, whatever the chat template makes of it."""

from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import (
    Encoded,
    encode_prompt,
    encode_sample,
    encode_samples,
    prompts_of,
)
from megatron_splitkv.data.corpus import supervised
from megatron_splitkv.data.text import Conversation, RawSample
from megatron_splitkv.data.tiny_target import byte_tokenizer

pytest.importorskip("transformers")

HEADS = "{% for m in messages %}<{{ m['role'] }}>"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = HEADS + "{{ m['content'] }};{% endfor %}" + PROMPT
MARKED = (
    HEADS + "{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] }};"
    "{%- endgeneration -%}{% else %}{{ m['content'] }};{% endif %}{% endfor %}" + PROMPT
)
# As Qwen3: only what comes after the last question still shows its thought, or an empty one.
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + HEADS
    + "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "[{{ m['content'].split(']')[0] if ']' in m['content'] else '' }}]{% endif %}"
    "{{ m['content'].split(']')[-1] }};{% endfor %}" + PROMPT
)
# As DeepSeek-R1: a prompt opens a thought that no finished turn shows.
OPENS = (
    HEADS + "{{ m['content'].split(']')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>[{% endif %}"
)
HIDES = "{{ messages[0]['content'] }}{% if add_generation_prompt %}:{% endif %}"


def talk(*contents: str, first: str = "user") -> Conversation:
    """Messages of two who take turns."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return Conversation(
        tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents))
    )


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encode(template: str | None, content: str | Conversation, length: int = 1000) -> Encoded:
    raw = RawSample("x.jsonl line 7", content)
    return encode_sample(tokenizer_with(template), raw, length, vocab_size=258)


def pieces(encoded: Encoded) -> str:
    """The document with its supervised parts in braces."""
    out, inside = "", False
    ids, mask = encoded.sample.token_ids.tolist(), encoded.sample.loss_mask.tolist()
    for token, carries in zip([*ids, 0], [*mask, False], strict=True):
        out += "{" * (carries and not inside) + "}" * (inside and not carries) + chr(token)
        inside = carries
    return out[:-1]


def test_samples_go_to_the_tokenizer_together() -> None:
    tokenizer = tokenizer_with(PLAIN)
    contents = [talk("q", "one", "r", "two"), "plain", talk("\xe9", "three"), "text"]
    raws = [RawSample(f"line {i}", content) for i, content in enumerate(contents)]
    alone = [encode_sample(tokenizer, raw, 30, vocab_size=258) for raw in raws]
    calls: list[int] = []

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.append(len(texts))
            return super().__call__(texts, **options)

    tokenizer.__class__ = Counting
    together = encode_samples(tokenizer, raws, 30, vocab_size=258)
    assert [pieces(one) for one in together] == [pieces(one) for one in alone]
    assert [one.prompt_tokens for one in together] == [one.prompt_tokens for one in alone]
    assert calls == [2, 5 + 3]
    assert encode_samples(tokenizer, [], 30, vocab_size=258) == []


def test_plain_text_is_supervised_everywhere() -> None:
    encoded = encode(None, "hello")
    assert pieces(encoded) == "{hello}"
    assert (encoded.prompt_tokens, encoded.truncated, encoded.rewritten) == (2, 0, 0)
    assert encode(None, "x" * 100).prompt_tokens == 32


@pytest.mark.parametrize(
    ("template", "said", "expected", "rewritten"),
    [
        (PLAIN, ("q", "ab"), "<user>q;<assistant>{ab;}", 0),
        (PLAIN, ("q", "ab", "r", "cd"), "<user>q;<assistant>{ab;}<user>r;<assistant>{cd;}", 0),
        (MARKED, ("q", "ab", "r", "cd"), "<user>q;<assistant>{ab;}<user>r;<assistant>{cd;}", 0),
        # The same words in the question and in both answers: each span is its own.
        (PLAIN, ("a", "a", "a", "a"), "<user>a;<assistant>{a;}<user>a;<assistant>{a;}", 0),
        (FORGETS, ("a", "a", "a", "a"), "<user>a;<assistant>{a;}<user>a;<assistant>{[]a;}", 0),
        (
            FORGETS,
            ("q", "  ab ", "r", "cd"),
            "<user>q;<assistant>{  ab ;}<user>r;<assistant>{[]cd;}",
            0,
        ),
        # What was thought is gone, so the answer is not what the target says: no loss.
        (
            FORGETS,
            ("q", "why]ab", "r", "t]cd"),
            "<user>q;<assistant>ab;<user>r;<assistant>{[t]cd;}",
            1,
        ),
        # A turn without a closing mark whose word stands in its heading, too.
        (
            FORGETS.replace("};{%", "}{%"),
            ("q", "user", "r", "cd"),
            "<user>q<assistant>{user}<user>r<assistant>{[]cd}",
            0,
        ),
        (
            OPENS.replace("};{%", "}{%"),
            ("q", "ant", "r", "cd"),
            "<user>q<assistant>{ant}<user>r<assistant>{cd}",
            0,
        ),
        (OPENS, ("q", "ab", "r", "cd"), "<user>q;<assistant>{ab;}<user>r;<assistant>{cd;}", 0),
    ],
)
def test_loss_on_what_the_assistant_says(
    template: str, said: tuple[str, ...], expected: str, rewritten: int
) -> None:
    encoded = encode(template, talk(*said))
    assert pieces(encoded) == expected
    assert encoded.rewritten == rewritten
    assert encoded.truncated == 0
    # Evaluation asks for the last response.
    bare = expected.replace("{", "").replace("}", "")
    assert encoded.prompt_tokens == bare.rindex("<assistant>") + len("<assistant>")


def test_an_assistant_that_speaks_first_answers_nothing() -> None:
    encoded = encode(PLAIN, talk("hi", "q", "ab", first="assistant"))
    assert pieces(encoded) == "<assistant>hi;<user>q;<assistant>{ab;}"
    assert encoded.rewritten == 1


def test_a_template_may_refuse_a_part_of_what_it_accepts() -> None:
    needs_user = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no question\\nat all') }}{% endif %}" + PLAIN
    )
    system = {"role": "system", "content": "s"}
    whole = Conversation((system, *talk("hi", "q", "ab", first="assistant").messages))
    assert pieces(encode(needs_user, whole)) == "<system>s;<assistant>hi;<user>q;<assistant>{ab;}"
    with pytest.raises(ConfigError, match=r"line 7: .* refuses the conversation: no question$"):
        encode(needs_user, Conversation((system, {"role": "assistant", "content": "ab"})))


def test_tool_calls_are_responses_and_templates_see_the_tools() -> None:
    template = (
        "{% for t in tools or [] %}({{ t['name'] }}){% endfor %}" + HEADS + "{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}!{{ c['name'] }}{% endfor %};{% endfor %}" + PROMPT
    )
    conversation = Conversation(
        (
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "it is 5"},
        ),
        tools=({"name": "look"},),
    )
    encoded = encode(template, conversation)
    assert pieces(encoded) == "(look)<user>q;<assistant>{!look;}<tool>5;<assistant>{it is 5;}"


def test_no_token_spans_prompt_and_response() -> None:
    """The tokenizer merges `>a` and `;<`, which decoding would never see as one token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = [*"<>;aqbusertin", ">a", ";<"]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(letters)},
        merges=[(">", "a"), (";", "<")],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    tokenizer.chat_template = PLAIN
    raw = RawSample("x", talk("q", "ab", "q", "ab"))
    encoded = encode_sample(tokenizer, raw, 1000, vocab_size=len(letters))
    tokens = tokenizer.convert_ids_to_tokens(encoded.sample.token_ids.tolist())
    assert "".join(tokens) == "<user>q;<assistant>ab;<user>q;<assistant>ab;"
    assert ">a" not in tokens
    assert tokens.count(";<") == 2  # inside a prompt it is one token, as in decoding
    said = [token for token, mask in zip(tokens, encoded.sample.loss_mask, strict=True) if mask]
    assert said == ["a", "b", ";", "a", "b", ";"]


@pytest.mark.parametrize(
    ("length", "expected", "prompt_tokens", "truncated"),
    [
        (44, "<user>q;<assistant>{ab;}<user>r;<assistant>{cd;}", 41, 0),
        (43, "<user>q;<assistant>{ab;}<user>r;<assistant>{cd}", 41, 1),
        # The second response does not begin: evaluation asks for the first.
        (41, "<user>q;<assistant>{ab;}<user>r;<assistant>", 19, 3),
        (21, "<user>q;<assistant>{ab}", 19, 23),
    ],
)
def test_truncation_on_the_right_is_counted(
    length: int, expected: str, prompt_tokens: int, truncated: int
) -> None:
    encoded = encode(PLAIN, talk("q", "ab", "r", "cd"), length)
    assert pieces(encoded) == expected
    assert (encoded.prompt_tokens, encoded.truncated) == (prompt_tokens, truncated)
    assert not encoded.without_response


@pytest.mark.parametrize("length", [8, 19, 20])
def test_a_prompt_that_fills_the_sequence_leaves_no_response(length: int) -> None:
    encoded = encode(PLAIN, talk("q", "ab"), length)
    assert encoded.without_response
    assert encoded.sample.token_ids.numel() == length
    assert encoded.truncated == 22 - length


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        (PLAIN, talk("q"), "must end with a message of the assistant"),
        (PLAIN, talk("q", "a", "r"), "must end with a message of the assistant"),
        (PLAIN, Conversation(()), "must end with a message of the assistant"),
        (PLAIN, talk("a", first="assistant"), "the response has no prompt"),
        (PLAIN, talk("q", " \n"), "message 2 is an empty response"),
        (PLAIN, talk("q", "", "r", "cd"), "message 2 is an empty response"),
        (None, talk("q", "ab"), "no chat template"),
        (
            PLAIN.replace("};{%", "}{%"),
            talk("q", "a"),
            r"response of 1 token\(s\) is shorter than 2",
        ),
        (None, "", r"of 0 token\(s\) is shorter than 2"),
        (None, "x", r"of 1 token\(s\) is shorter than 2"),
        (HIDES, talk("q", "ab"), "does not show the last response behind its prompt"),
        (OPENS, talk("q", "ab", "r", "why]cd"), "does not show the last response"),
        (MARKED.replace("assistant'", "x'"), talk("q", "ab"), "does not show the last response"),
        (
            "{{ nowhere.at.all }}",
            talk("q", "ab"),
            "refuses the conversation: 'nowhere' is undefined",
        ),
    ],
)
def test_bad_samples_are_one_line_with_their_origin(
    template: str | None, content: str | Conversation, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^x\.jsonl line 7: .*{message}") as error:
        encode(template, content)
    assert "\n" not in str(error.value)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    raw = RawSample("x.jsonl line 7", "~}")
    assert encode_sample(byte_tokenizer(), raw, 9, vocab_size=127).sample.token_ids.tolist() == [
        126,
        125,
    ]
    with pytest.raises(ConfigError, match=r"line 7: token 126 is outside .* vocabulary of 126"):
        encode_sample(byte_tokenizer(), raw, 9, vocab_size=126)


def test_without_response_needs_two_supervised_tokens() -> None:
    ids = torch.arange(5)
    assert [Encoded(supervised(ids, n)).without_response for n in (3, 4, 5)] == [False, True, True]


def test_prompts_are_what_was_said_before_each_answer() -> None:
    tools = ({"name": "look"},)
    spoken = Conversation(talk("q", "ab", "r", "cd").messages, tools)
    assert prompts_of(spoken) == [
        Conversation(spoken.messages[:1], tools),
        Conversation(spoken.messages[:3], tools),
    ]
    assert prompts_of(talk("q", "ab", "r")) == [talk("q"), talk("q", "ab", "r")]
    assert prompts_of(talk("hi", "q", "ab", first="assistant")) == [
        talk("hi", "q", first="assistant")
    ]
    assert prompts_of(Conversation(())) == []


def test_a_prompt_is_the_tokens_in_front_of_its_response() -> None:
    conversation = talk("q", "ab", "r", "cd")
    encoded = encode(PLAIN, conversation)
    prompt = encode_prompt(tokenizer_with(PLAIN), prompts_of(conversation)[-1], "x")
    assert prompt.tolist() == encoded.sample.token_ids[: encoded.prompt_tokens].tolist()
    assert bytes(prompt.tolist()) == b"<user>q;<assistant>ab;<user>r;<assistant>"
    with pytest.raises(ConfigError, match=r"x line 2: .* no chat template"):
        encode_prompt(tokenizer_with(None), conversation, "x line 2")
