"""Evaluation of drafters: greedy speculative decoding with the real target, beside controls."""

from megatron_splitkv.evaluate.draft_model import DraftModel
from megatron_splitkv.evaluate.evaluation import evaluate_drafter
from megatron_splitkv.evaluate.heads import ProposalHead, proposal_head
from megatron_splitkv.evaluate.journal import Journal, evaluation_inputs
from megatron_splitkv.evaluate.prompts import EvaluationPrompt, PromptTokenizer, read_prompts
from megatron_splitkv.evaluate.report import print_table, write_report
from megatron_splitkv.evaluate.result import EvaluationResult

__all__ = [
    "DraftModel",
    "EvaluationPrompt",
    "EvaluationResult",
    "Journal",
    "PromptTokenizer",
    "ProposalHead",
    "evaluate_drafter",
    "evaluation_inputs",
    "print_table",
    "proposal_head",
    "read_prompts",
    "write_report",
]
