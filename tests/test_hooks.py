"""`enable` and `disable`: what they change, when they refuse, and that nothing is left."""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import ModuleSpec, attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training import arguments

import megatron_splitkv
from megatron_splitkv import hooks
from megatron_splitkv.attention import SplitKVCoreAttention
from megatron_splitkv.compat import environment
from megatron_splitkv.config import ConfigError
from tests import stock_layer

ORIGINALS = {
    (attention.Attention, "__init__"): attention.Attention.__init__,
    (arguments, "add_megatron_arguments"): arguments.add_megatron_arguments,
}


def are_original() -> bool:
    return all(vars(owner)[name] is it for (owner, name), it in ORIGINALS.items())


@pytest.fixture
def enabled() -> Iterator[None]:
    megatron_splitkv.enable()
    yield
    megatron_splitkv.disable()
    assert are_original()


class _Own(torch.nn.Module):
    """A core attention that a user's spec names."""

    def __init__(self, cp_comm_type: str | None, **_: Any) -> None:
        super().__init__()
        self.cp_comm_type = cp_comm_type


def _help() -> str:
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    (action,) = (a for a in parser._actions if "--cp-comm-type" in a.option_strings)
    return str(action.help)


def test_enable_and_disable_can_be_repeated_and_leave_the_very_same_objects() -> None:
    assert are_original()
    for _ in range(2):
        for _ in range(2):
            megatron_splitkv.enable()
            assert hooks.enabled()
            replaced = {key: vars(key[0])[key[1]] for key in ORIGINALS}
            assert all(it is not ORIGINALS[key] for key, it in replaced.items())
            # Wrapped once, not twice.
            assert all(it.__wrapped__ is ORIGINALS[key] for key, it in replaced.items())
        for _ in range(2):
            megatron_splitkv.disable()
            assert not hooks.enabled()
            assert are_original()


def test_the_help_lists_splitkv_while_enabled() -> None:
    before = _help()
    assert "splitkv" not in before
    megatron_splitkv.enable()
    try:
        assert _help().startswith(f"{before}. With megatron-splitkv also: splitkv")
    finally:
        megatron_splitkv.disable()
    assert _help() == before


def test_a_fork_whose_help_says_it_already_keeps_its_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--cp-comm-type", help="p2p or splitkv")
        return parser

    monkeypatch.setattr(arguments, "add_megatron_arguments", patched)
    megatron_splitkv.enable()
    try:
        assert _help() == "p2p or splitkv"
    finally:
        megatron_splitkv.disable()
    assert arguments.add_megatron_arguments is patched


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    "stock",
    [DotProductAttention, TEDotProductAttention, ModuleSpec(module=DotProductAttention)],
    ids=["local", "transformer_engine", "ModuleSpec"],
)
def test_stock_attention_gives_way_where_the_layer_says_splitkv(stock: Any) -> None:
    core = stock_layer.core_attention_of(stock)
    assert isinstance(core, SplitKVCoreAttention)
    assert core.strategy == "splitkv"
    assert core.attn_mask_type is AttnMaskType.causal
    assert core.cp_group is not None
    assert core.cp_group.size() == 2


@pytest.mark.usefixtures("enabled")
def test_each_layer_of_a_shared_spec_gets_its_own_type() -> None:
    """The spec is not changed, and the type counts however it is passed."""
    submodules = stock_layer.submodules(_Own)

    class Positional(attention.SelfAttention):
        def __init__(self, cp_comm_type: str) -> None:
            attention.Attention.__init__(
                self,
                stock_layer.config(["p2p", "splitkv"]),
                submodules,
                1,
                AttnMaskType.causal,
                "self",
                cp_comm_type,
                stock_layer.groups(),
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "_stock_core_attentions", lambda: (_Own,))
        first, second = Positional("p2p").core_attention, Positional("splitkv").core_attention
    assert isinstance(first, _Own)
    assert first.cp_comm_type == "p2p"
    assert isinstance(second, SplitKVCoreAttention)
    assert submodules.core_attention is _Own


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("cp_comm_type", ["splitkv", "p2p", None])
def test_a_core_attention_of_the_users_stays(cp_comm_type: str | None) -> None:
    core = stock_layer.core_attention_of(_Own, cp_comm_type)
    assert isinstance(core, _Own)
    assert core.cp_comm_type == cp_comm_type


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("cp_comm_type", ["p2p", "a2a", "splitkv ", None])
def test_other_types_stay_megatrons_business(cp_comm_type: str | None) -> None:
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        stock_layer.core_attention_of(DotProductAttention, cp_comm_type)


def test_without_enable_megatron_refuses() -> None:
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        stock_layer.core_attention_of(DotProductAttention)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("cp_comm_type", ["splitkv", ["p2p", "splitkv"]])
def test_latent_attention_is_refused(cp_comm_type: Any) -> None:
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        multi_latent_attention=True,
        context_parallel_size=2,
        cp_comm_type=cp_comm_type,
    )
    with pytest.raises(ConfigError, match="splitkv does not support --multi-latent-attention"):
        MLASelfAttention(
            config,
            stock_layer.submodules(DotProductAttention),
            1,
            cp_comm_type="splitkv",
            pg_collection=stock_layer.groups(),
        )


def test_an_unknown_version_is_refused_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "megatron_core_version", lambda: "0.20.0")
    with pytest.raises(ConfigError, match=r"0\.20\.0 is not supported"):
        megatron_splitkv.enable()
    assert are_original()
    assert not hooks.enabled()


def _other_arguments(parser: Any, groups: Any) -> Any: ...


def _other_init(self: Any, config: Any, submodules: Any, layer_number: int) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "unknown", "message"),
    [
        (arguments, "add_megatron_arguments", _other_arguments, r"_other_arguments.*'groups'"),
        (attention.Attention, "__init__", _other_init, r"_other_init.*lacks.*'cp_comm_type'"),
    ],
)
def test_an_unknown_form_of_either_leaves_both_untouched(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, unknown: Any, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, unknown)
        with pytest.raises(ConfigError, match=message):
            megatron_splitkv.enable()
        assert vars(owner)[name] is unknown
    assert are_original()
    assert not hooks.enabled()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (attention.Attention, "__init__", r"core\.transformer\.attention\.Attention\.__init__"),
        (arguments, "add_megatron_arguments", r"training\.arguments\.add_megatron_arguments"),
    ],
)
def test_what_somebody_replaced_since_is_named_and_left(owner: Any, name: str, place: str) -> None:
    ours = {key: vars(key[0])[key[1]] for key in ORIGINALS}

    @functools.wraps(ours[owner, name])  # takes its name, too
    def intruder(*args: Any, **kwargs: Any) -> Any:
        return ours[owner, name](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, intruder)
        for call in (megatron_splitkv.disable, megatron_splitkv.enable):
            with pytest.raises(ConfigError, match=rf"{place} was replaced by .*intruder"):
                call()
            expected = ours | {(owner, name): intruder}
            assert all(vars(key[0])[key[1]] is it for key, it in expected.items())
    megatron_splitkv.enable()  # everything is in its place again
