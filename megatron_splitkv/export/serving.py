"""How an exported drafter is served: the commands that lie beside it.

What a server has to be told differs by kind. vLLM counts proposals, SGLang's DFlash counts what is
verified in one pass, and its DSpark counts proposals again.

Source: vllm-project/vllm, `docs/features/speculative_decoding/README.md` and `dflash.md`,
`model_executor/models/qwen3_dspark.py`; sgl-project/sglang, `srt/speculative/dspark_components/`,
`srt/models/dflash.py`; z-lab/dflash, `README.md`.
"""

import json
import shlex

from megatron_splitkv.drafter.config import SLIDING_ATTENTION, DFlashConfig

SERVING_FILE = "SERVING.md"
_TARGET, _DRAFTER = "TARGET", "/path/to/this/folder"


def serving_notes(config: DFlashConfig, layout: str, target: str | None = None) -> str:
    """Commands for the serving engines that read a layout, as Markdown.

    Args:
        config: the drafter.
        layout: ``zlab`` or ``speculators``.
        target: folder or name of the model that it drafts for.
    """
    target = target or _TARGET
    lines = [
        f"# Serving this {_TITLES[config.kind]} drafter",
        "",
        f"It drafts for `{target}`: {config.num_proposals} tokens a step, blocks of "
        f"{config.block_size}. Put this folder's path for `{_DRAFTER}`.",
        "",
        "## vLLM",
        "",
        "```",
        *_vllm(config, target),
        "```",
        "",
    ]
    if config.kind == "domino":
        lines += [
            "Domino is a head of DFlash there (`dflash_config.projector_type`): a vLLM without it "
            "refuses the tensors of the head.",
            "",
        ]
    if layout == "zlab":
        lines += ["## SGLang", "", "```", *_sglang(config, target), "```", ""]
        if config.kind == "domino":
            lines += [
                "SGLang takes the block's size from this folder, and Domino from "
                "`dflash_config.projector_type`.",
                "",
            ]
    else:
        lines += ["SGLang reads the z-lab layout: `splitkv export --format zlab`.", ""]
    if SLIDING_ATTENTION in config.layer_types:
        lines += [
            f"Some layers slide over {config.sliding_window} tokens: an engine that does not read "
            "`layer_types` accepts less.",
            "",
        ]
    return "\n".join(lines)


def _vllm(config: DFlashConfig, target: str) -> list[str]:
    speculative = {
        # Domino is a head of the DFlash method.
        "method": "dspark" if config.kind == "dspark" else "dflash",
        "model": _DRAFTER,
        "num_speculative_tokens": config.num_proposals,
    }
    return [
        f"vllm serve {shlex.quote(target)} \\",
        f"  --speculative-config '{json.dumps(speculative)}'",
    ]


def _sglang(config: DFlashConfig, target: str) -> list[str]:
    algorithm = "DSPARK" if config.kind == "dspark" else "DFLASH"
    lines = [
        "python -m sglang.launch_server \\",
        f"  --model-path {shlex.quote(target)} \\",
        f"  --speculative-algorithm {algorithm} \\",
        f"  --speculative-draft-model-path {_DRAFTER}",
    ]
    if config.kind == "dflash":
        lines[-1] += " \\"
        # The anchor's own token is verified with the proposals.
        lines.append(f"  --speculative-num-draft-tokens {config.block_size}")
    if config.kind == "dspark":
        lines[-1] += " \\"
        lines.append(f"  --speculative-dspark-block-size {config.num_proposals}")
    return lines


_TITLES = {"dflash": "DFlash", "domino": "Domino", "dspark": "DSpark"}
