"""Command line of the drafter itself: its kind, its block, and what only some kinds have."""

import argparse
from dataclasses import MISSING, fields
from typing import Any

from megatron_splitkv.config import DRAFTERS, ConfigError, require_choice
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.drafter.config import LOSS_WEIGHTS, DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import MARKOV_HEADS, DSparkConfig
from megatron_splitkv.drafter.kinds import config_class

# Fields of a configuration that an option of the same name sets; None leaves the kind's default.
_OF_ALL_KINDS = (
    "block_size",
    "loss_decay_gamma",
    "layer_types",
    "sliding_window",
    "input_embedding_scale",
    "final_logit_softcapping",
    "loss_weights",
    "distillation_weight",
)


def add_drafter_arguments(group: Any) -> None:
    """Add the options that describe the drafter.

    Args:
        group: of Megatron's parser.
    """
    group.add_argument(
        "--drafter",
        default="dflash",
        metavar="KIND",
        help=f"Kind of drafter: one of {', '.join(DRAFTERS)}. Default: dflash.",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="B",
        help="Slots of a draft block: the anchor's token and those to draft. Default: "
        f"{_default(DFlashConfig, 'block_size')}; {_default(DSparkConfig, 'block_size')} for "
        "dspark.",
    )
    group.add_argument(
        "--loss-decay-gamma",
        type=float,
        metavar="G",
        help="A slot weighs exp(-distance / G) in the loss, by its distance from the first that "
        f"is trained. Default: {_default(DFlashConfig, 'loss_decay_gamma')}, which suits B = 16; "
        f"{_default(DSparkConfig, 'loss_decay_gamma')} for dspark.",
    )
    group.add_argument(
        "--layer-types",
        nargs="+",
        metavar="TYPE",
        help="full_attention or sliding_attention for each layer. Default: full attention.",
    )
    group.add_argument(
        "--sliding-window",
        type=int,
        metavar="W",
        help="Tokens that a query of a sliding layer sees, itself included.",
    )
    group.add_argument(
        "--input-embedding-scale",
        type=float,
        metavar="X",
        help="What the target multiplies its embeddings with. Default: 1.",
    )
    group.add_argument(
        "--final-logit-softcapping",
        type=float,
        metavar="C",
        help="Bound of the target's logits, C tanh(logits / C). Default: none.",
    )
    group.add_argument(
        "--loss-weights",
        metavar="NAME",
        help=f"What a slot weighs in the loss: one of {', '.join(LOSS_WEIGHTS)}. decay: less the "
        "further it is from the anchor; dpace: the acceptance that it can still earn as the "
        "drafter now stands. dflash alone. Default: decay.",
    )
    group.add_argument(
        "--distillation-weight",
        type=float,
        metavar="X",
        help="Share, in [0, 1], of the KL divergence from the target's own distribution in the "
        "loss; cross-entropy has the rest. Needs a store of `splitkv prepare --final-hidden`, or "
        "--online-target. dflash alone. Default: 0.",
    )
    domino = "Domino: "
    group.add_argument(
        "--emb-dim", type=int, metavar="E", help=domino + "inner width of the correcting head."
    )
    group.add_argument(
        "--gru-hidden-dim", type=int, metavar="G", help=domino + "width of the recurrent state."
    )
    group.add_argument(
        "--pure-draft-prefix-len",
        type=int,
        metavar="N",
        help=domino + "first proposals that the backbone makes alone.",
    )
    group.add_argument(
        "--shift-label",
        action=argparse.BooleanOptionalAction,
        help=domino + "a slot predicts the token behind it, not its own. Default: it does.",
    )
    group.add_argument(
        "--base-loss-decay-ratio",
        type=float,
        metavar="X",
        help=domino + "share of the training over which the weight of the backbone's own loss "
        "falls from one to zero.",
    )
    dspark = "DSpark: "
    group.add_argument(
        "--markov-rank", type=int, metavar="R", help=dspark + "rank of the bias between tokens."
    )
    group.add_argument(
        "--markov-head-type", metavar="TYPE", help=dspark + f"one of {', '.join(MARKOV_HEADS)}."
    )
    for name, what in (
        ("ce", "cross-entropy"),
        ("l1", "distance to the target's distribution"),
        ("confidence", "confidence head"),
    ):
        group.add_argument(
            f"--{name}-weight", type=float, metavar="X", help=f"{dspark}loss weight of the {what}."
        )


def complete_drafter_arguments(args: argparse.Namespace) -> None:
    """Fill in, in place, what the kind of drafter decides.

    Args:
        args: parsed.

    Raises:
        ConfigError: an unknown kind, or an option of another kind.
    """
    kind = config_class(require_choice("--drafter", args.drafter, DRAFTERS))
    own = {f.name for f in fields(kind)}
    for other in (DominoConfig, DSparkConfig):
        for name in _own_fields(other):
            if name not in own and getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of {other.kind} drafters, --drafter is "
                    f"{args.drafter}; drop one"
                )
    if args.loss_weights == "dpace" and args.loss_decay_gamma is not None:
        raise ConfigError(
            "--loss-weights dpace has no --loss-decay-gamma: slots weigh what they can still earn; "
            "drop one"
        )
    for name in ("block_size", "loss_decay_gamma"):
        if getattr(args, name) is None:
            setattr(args, name, _default(kind, name))


def drafter_config(args: argparse.Namespace, meta: StoreMeta) -> DFlashConfig:
    """The drafter that completed arguments and a store describe.

    Args:
        args: validated.
        meta: of the training store.

    Raises:
        ConfigError: one that cannot be.
    """
    kind = config_class(args.drafter)
    names = option_fields(kind)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    target = meta.target
    return kind(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        vocab_size=args.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=meta.target_layer_ids,
        mask_token_id=args.mask_token_id,
        rope_theta=float(args.rotary_base),
        rms_norm_eps=args.layernorm_epsilon,
        max_position_embeddings=args.max_position_embeddings,
        eos_token_ids=target.eos_token_ids,
        pad_token_id=target.pad_token_id,
        **given,
    )


def option_fields(kind: type[DFlashConfig]) -> list[str]:
    """Fields of a kind that an option of the same name sets."""
    return [*_OF_ALL_KINDS, *_own_fields(kind)]


def _own_fields(kind: type[DFlashConfig]) -> list[str]:
    """Fields that a kind has beyond DFlash's."""
    shared = {f.name for f in fields(DFlashConfig)}
    return [f.name for f in fields(kind) if f.name not in shared]


def _default(kind: type[DFlashConfig], name: str) -> Any:
    value = {f.name: f.default for f in fields(kind)}[name]
    assert value is not MISSING
    return value
