"""Which documents of a stream are held out: a sixteenth for validation, each with a prompt."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Prompt
from megatron_splitkv.data.sample_stores import CorpusEntry

_ONE_IN = 16


def hold_out(documents: Iterable[tuple[int, Encoded]], tokenizer: Any) -> Iterator[CorpusEntry]:
    """Every sixteenth usable document goes to the validation store and gives a prompt.

    Of fewer than sixteen usable ones the last does, so the first sixteen are looked at before any
    is passed on.

    Args:
        documents: each with its number among the samples; those without a response pass through,
            to be counted.
        tokenizer: the target's, to show prompts as text.
    """
    documents = iter(documents)
    head: list[tuple[int, Encoded]] = []
    usable = 0
    for numbered in documents:
        head.append(numbered)
        usable += not numbered[1].without_response
        if usable == _ONE_IN:
            break
    place = 0
    for number, document in chain(head, documents):
        place += not document.without_response
        if document.without_response or place % usable:
            yield CorpusEntry("train", document)
            continue
        ids = document.sample.token_ids[: document.prompt_tokens].tolist()
        yield CorpusEntry("valid", document, Prompt(f"sample-{number}", tokenizer.decode(ids), ids))


def held_out(usable: Sequence[int]) -> Sequence[int]:
    """Which of the usable documents `hold_out` has put into the validation store.

    Args:
        usable: their numbers among the samples, ascending, at least one.
    """
    step = min(_ONE_IN, len(usable))
    return usable[step - 1 :: step]
