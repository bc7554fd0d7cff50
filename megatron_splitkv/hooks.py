"""`enable` and `disable`: ``--cp-comm-type splitkv`` in Megatron scripts without a ModuleSpec.

For scripts that build stock layers. `enable` wraps two functions of Megatron, and `disable` puts
them back:

* ``Attention.__init__``, where every layer builds its core attention, whichever spec, provider or
  model named it. A stock core attention of a layer whose `cp_comm_type` is ours becomes
  `SplitKVCoreAttention`; specs are not changed, and a core attention of the user's own stays.
* ``add_megatron_arguments``, whose help then lists our values.

The batch needs nothing: `SplitKVCoreAttention` reads the order in which Megatron deals rows out.
"""

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_splitkv import compat
from megatron_splitkv.config import ConfigError

# The peers' strategies are for draft blocks alone: other layers leave them to Megatron.
_ADDED_TYPES = ("splitkv",)


@dataclass(frozen=True)
class _Hook:
    """One function of Megatron and what takes its place.

    Args:
        owner: the class or module that holds it.
        name: its name there.
        original: what was there.
        wrapper: ours.
    """

    owner: type | ModuleType
    name: str
    original: Callable[..., Any]
    wrapper: Callable[..., Any]

    def check_in_place(self) -> None:
        """Refuse when somebody has put something else in the wrapper's place."""
        found = vars(self.owner).get(self.name)
        if found is not self.wrapper:
            owner = self.owner
            path = owner.__name__ if isinstance(owner, ModuleType) else _path_of(owner)
            raise ConfigError(
                f"{path}.{self.name} was replaced by {_path_of(found)} after "
                "megatron_splitkv.enable(); undo that first, or do it before enable()"
            )


_hooks: list[_Hook] = []


def enable() -> None:
    """Let stock Megatron layers be built with split-KV where their ``--cp-comm-type`` says so.

    Call it before the arguments are parsed and the model is built. Both functions are checked
    before either is replaced; calling it again changes nothing.

    Raises:
        ConfigError: Megatron is missing, of an unknown version or of an unknown form, or somebody
            replaced our wrappers since.
    """
    if _hooks:
        _check_in_place()
        return
    compat.check_environment()
    hooks = (_core_attention_hook(), _help_hook())
    for hook in hooks:
        setattr(hook.owner, hook.name, hook.wrapper)
    _hooks.extend(hooks)


def disable() -> None:
    """Undo `enable`: put back the very objects that were there; nothing if it is not in force.

    Layers that were built meanwhile keep their attention.

    Raises:
        ConfigError: somebody replaced our wrappers since; nothing is changed then.
    """
    _check_in_place()
    while _hooks:
        hook = _hooks.pop()
        setattr(hook.owner, hook.name, hook.original)


def enabled() -> bool:
    """Whether `enable` is in force."""
    return bool(_hooks)


def core_attention_for(core_attention: Any, cp_comm_type: str | None) -> Any:
    """What builds the core attention of a layer: ours instead of a stock one, where it is asked.

    Also what the text patches for forks call (``patches/megatron-lm``).

    Args:
        core_attention: what the layer's spec names: a class, a `ModuleSpec` or any builder.
        cp_comm_type: of the layer; None without context parallelism.
    """
    if cp_comm_type not in _ADDED_TYPES:
        return core_attention
    spec = importlib.import_module("megatron.core.transformer.spec_utils").ModuleSpec
    is_spec = isinstance(core_attention, spec)
    named = core_attention.module if is_spec else core_attention
    if not any(named is stock for stock in _stock_core_attentions()):
        return core_attention
    from megatron_splitkv.attention import SplitKVCoreAttention

    if is_spec:
        return dataclasses.replace(core_attention, module=SplitKVCoreAttention)
    return SplitKVCoreAttention


def _stock_core_attentions() -> tuple[Any, Any]:
    local = importlib.import_module("megatron.core.transformer.dot_product_attention")
    te = importlib.import_module("megatron.core.extensions.transformer_engine")
    return local.DotProductAttention, te.TEDotProductAttention


def _core_attention_hook() -> _Hook:
    attention = importlib.import_module("megatron.core.transformer.attention")
    original = attention.Attention.__init__
    package = f"megatron-core {compat.megatron_core_version()}"
    compat.require_parameters(
        original,
        (
            *("self", "config", "submodules", "layer_number", "attn_mask_type", "attention_type"),
            *("cp_comm_type", "pg_collection"),
        ),
        package,
    )
    compat.require_parameters(
        attention.CoreAttentionBuilder.__call__,
        (
            *("self", "config", "layer_number", "attn_mask_type", "attention_type"),
            *("cp_comm_type", "softmax_scale", "pg_collection"),
        ),
        package,
    )

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = compat.bind_arguments(original, args, kwargs)
        given = bound.arguments
        _refuse_latent_attention(given["config"])
        submodules = given["submodules"]
        core_attention = core_attention_for(submodules.core_attention, given.get("cp_comm_type"))
        if core_attention is not submodules.core_attention:
            # The spec is shared by layers whose types may differ.
            given["submodules"] = dataclasses.replace(submodules, core_attention=core_attention)
        original(*bound.args, **bound.kwargs)

    return _Hook(attention.Attention, "__init__", original, init)


def _refuse_latent_attention(config: Any) -> None:
    """Latent attention hides `cp_comm_type` from its base class, and its keys and values differ."""
    if not config.multi_latent_attention or config.context_parallel_size == 1:
        return
    types = config.cp_comm_type
    asked = set(_ADDED_TYPES) & set([types] if isinstance(types, str) else types or ())
    if asked:
        raise ConfigError(
            f"--cp-comm-type {', '.join(sorted(asked))} does not support --multi-latent-attention, "
            "whose keys and values differ in width; use a type of Transformer Engine's"
        )


def _help_hook() -> _Hook:
    arguments = importlib.import_module("megatron.training.arguments")
    original = arguments.add_megatron_arguments
    compat.require_parameters(
        original, ("parser",), f"megatron-core {compat.megatron_core_version()}"
    )

    @functools.wraps(original)
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        for action in parser._actions:
            if "--cp-comm-type" in action.option_strings and "splitkv" not in str(action.help):
                added = ", ".join(_ADDED_TYPES)
                action.help = f"{action.help}. With megatron-splitkv also: {added}."
        return parser

    return _Hook(arguments, "add_megatron_arguments", original, add_arguments)


def _check_in_place() -> None:
    for hook in _hooks:
        hook.check_in_place()


def _path_of(found: Any) -> str:
    """Where a class or function was written, whatever name a decorator gave it."""
    if code := getattr(found, "__code__", None):
        return f"{found.__globals__['__name__']}.{code.co_qualname}"
    return f"{found.__module__}.{found.__qualname__}" if isinstance(found, type) else repr(found)
