"""The one place that knows how Megatron-core's and Transformer Engine's releases differ.

Supported: megatron-core 0.18.2 up to, not including, 0.20; Transformer Engine from 2.8. What
differs is found by looking at the installed code, and named in a `ConfigError` when it is none of
the known forms.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.config import ConfigError

OLDEST_MEGATRON_CORE = (0, 18, 2)
FIRST_UNKNOWN_MEGATRON_CORE = (0, 20)


def check_environment() -> None:
    """Refuse a missing or unknown megatron-core, and one without what its training needs.

    Raises:
        ConfigError: naming what is installed, what is wanted, and how to get it.
    """
    wanted = "megatron-core >= {}, < {}".format(
        ".".join(map(str, OLDEST_MEGATRON_CORE)), ".".join(map(str, FIRST_UNKNOWN_MEGATRON_CORE))
    )
    version = megatron_core_version()
    if version is None:
        raise ConfigError(f"megatron-core is not installed; install {wanted}")
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
    if not OLDEST_MEGATRON_CORE <= release < FIRST_UNKNOWN_MEGATRON_CORE:
        raise ConfigError(f"megatron-core {version} is not supported; install {wanted}")
    if importlib.util.find_spec("megatron.training") is None:
        raise ConfigError(
            f"megatron-core {version} has no megatron.training; install {wanted} from PyPI, or put "
            "a Megatron-LM checkout of that version on PYTHONPATH"
        )
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError(
            "psutil is not installed and Megatron's checkpoint writer needs it; pip install psutil"
        )


def megatron_core_version() -> str | None:
    """The version of the megatron-core that would be imported, None if there is none."""
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError:
        return None


def has_fused_optimizers() -> bool:
    """Whether Megatron found an Adam of Transformer Engine or apex."""
    return not importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER


def skip_missing_dataset_helpers() -> bool:
    """Do without Megatron's compilation of a dataset extension that is compiled already.

    The wheels ship the compiled ``helpers_cpp`` but not the Makefile that ``pretrain()`` runs on
    local rank 0, and Megatron ends the process when make fails.

    Returns:
        Whether Megatron's step was replaced.
    """
    utils = importlib.import_module("megatron.core.datasets.utils")
    has_makefile = (Path(str(utils.__file__)).parent / "Makefile").is_file()
    if has_makefile or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return False
    setattr(utils, "compile_helpers", lambda: None)  # noqa: B010 (a module has no such field)
    return True


def leave_out_gpt_estimates() -> None:
    """Stop Megatron from printing a GPT's parameter and memory estimates for a drafter."""
    training = importlib.import_module("megatron.training.training")
    setattr(training, "report_theoretical_memory", lambda *_, **__: None)  # noqa: B010


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
) -> argparse.Namespace:
    """Parse Megatron's arguments and ours; nothing is checked or made global yet."""
    arguments = importlib.import_module("megatron.training.arguments")
    return arguments.parse_args(lambda parser: _mend_help(extra_args_provider(parser)))


def _mend_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape help texts with a bare ``%``: one of them and ``--help`` ends in a traceback."""
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = str(action.help).replace("%", "%%")
    return parser


def validate_args(args: argparse.Namespace) -> None:
    """Let Megatron check and complete the arguments, in place.

    Raises:
        ConfigError: with the reason of Megatron's assertion.
    """
    with _megatrons_refusals():
        importlib.import_module("megatron.training.arguments").validate_args(args)


def transformer_config(args: argparse.Namespace) -> Any:
    """Megatron's `TransformerConfig` from validated arguments.

    Raises:
        ConfigError: with the reason of Megatron's assertion.
    """
    module = importlib.import_module("megatron.training.argument_utils")
    with _megatrons_refusals():
        return module.core_transformer_config_from_args(args)


@contextlib.contextmanager
def _megatrons_refusals() -> Iterator[None]:
    try:
        yield
    except (AssertionError, ValueError) as error:
        # Many of Megatron's assertions carry no message: then the asserted line says it.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"Megatron refuses the arguments: {reason}") from error


def publish_args(args: argparse.Namespace) -> None:
    """Make the arguments global and build what hangs on them: timers, TensorBoard writer.

    No tokenizer: tokens come from the feature store, and Megatron's tokenizers import transformers.
    """
    global_vars = importlib.import_module("megatron.training.global_vars")
    global_vars.set_global_variables(args, build_tokenizer=False)


def run_pretrain(
    args: argparse.Namespace,
    *,
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
) -> None:
    """Call the installed Megatron's ``pretrain()`` for a model that is not a GPT.

    Args:
        args: published by `publish_args`.
        datasets_provider: ``(num_samples) -> (train, valid, test)``.
        model_provider: builds the model; used because the configuration container names none.
        forward_step: ``(data_iterator, model) -> (output, loss_func)``.

    Raises:
        ConfigError: on every rank, when a resumed run has another learning-rate schedule.
    """
    training = importlib.import_module("megatron.training.training")
    argument_utils = importlib.import_module("megatron.training.argument_utils")
    enums = importlib.import_module("megatron.core.enums")
    # A container with a model configuration would be built instead of the provider's model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it recommends one
        container = argument_utils.pretrain_cfg_container_from_args(args, None)
    arguments = {
        "cfg_container": container,
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": enums.ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    # By keyword: 0.18 and 0.19 disagree about the position of model_provider.
    require_parameters(training.pretrain, arguments, f"megatron-core {megatron_core_version()}")
    try:
        training.pretrain(**arguments)
    except AssertionError as error:
        if "OptimizerParamScheduler" not in str(error):
            raise
        raise ConfigError(
            f"the checkpoint was written with another learning-rate schedule ({error}); give the "
            "same --train-iters and warm-up, or add --override-opt-param-scheduler"
        ) from error
    if torch.distributed.is_initialized():  # Megatron leaves the groups to the script
        torch.distributed.destroy_process_group()


# Transformer Engine. Up to 2.14 the backward demands the TE dtype of its gradients; from 2.15 on it
# derives it, and both functions must be told the layout of outputs, which defaults to another one.

_FUSED_ATTENTION = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_PER_CALL = (
    *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
    *("cu_seqlens_kv_padded", "q", "k", "v", "fake_dtype", "attn_scale"),
)
_PER_FORWARD_CALL = (*_PER_CALL, "rng_gen")
_PER_BACKWARD_CALL = (*_PER_CALL, "o", "d_o", "aux_ctx_tensors", "deterministic")


@dataclass(frozen=True)
class FusedAttention:
    """Transformer Engine's fused attention on ranges of rows (THD), whatever its version.

    Args:
        forward: ``(**per call) -> (out, [statistics, rng_state])``.
        backward: ``(**per call) -> [dq, dk, dv, ...]``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; importing it takes seconds and can still fail."""
    return importlib.util.find_spec("transformer_engine") is not None


def fused_attention() -> FusedAttention:
    """The installed Transformer Engine's fused attention, with all that stays the same given.

    Raises:
        ConfigError: it cannot be imported, or its functions have an unknown form.
    """
    try:
        functions = importlib.import_module(_FUSED_ATTENTION)
        dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    except Exception as error:  # a binary that does not fit torch or CUDA raises what it likes
        raise ConfigError(f"Transformer Engine cannot be imported: {error!r}") from error
    return bind_fused_attention(functions, dtypes)


def bind_fused_attention(functions: Any, dtypes: Any) -> FusedAttention:
    """Bind two functions of Transformer Engine to one form.

    Args:
        functions: a module with `fused_attn_fwd`, `fused_attn_bwd` and `FusedAttnBackend`.
        dtypes: from torch's dtypes to Transformer Engine's.

    Raises:
        ConfigError: the functions cannot be called with these keywords.
    """
    shared = {
        "fused_attention_backend": functions.FusedAttnBackend["F16_arbitrary_seqlen"],
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "attn_mask_type": "padding",
    }
    forward_only: dict[str, Any] = {"is_training": True}
    backward_only: dict[str, Any] = {}
    if "o_format" in inspect.signature(functions.fused_attn_fwd).parameters:
        forward_only["o_format"] = "thd"
        backward_only = {"o_format": "thd", "do_format": "thd", "dqkv_layout": "thd_thd_thd"}
    demands_dtype = "dqkv_dtype" in inspect.signature(functions.fused_attn_bwd).parameters

    def forward(**per_call: Any) -> Any:
        return functions.fused_attn_fwd(**shared, **forward_only, **per_call)

    def backward(**per_call: Any) -> Any:
        if demands_dtype:
            per_call["dqkv_dtype"] = dtypes[per_call["fake_dtype"]]
        return functions.fused_attn_bwd(**shared, **backward_only, **per_call)

    package = "the installed Transformer Engine"
    dtype_keyword = ("dqkv_dtype",) if demands_dtype else ()
    require_parameters(
        functions.fused_attn_fwd, (*shared, *forward_only, *_PER_FORWARD_CALL), package
    )
    require_parameters(
        functions.fused_attn_bwd,
        (*shared, *backward_only, *dtype_keyword, *_PER_BACKWARD_CALL),
        package,
    )
    return FusedAttention(forward, backward)


def flex_attention_with_lse() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """torch's `flex_attention`, returning its output and the natural log-sum-exp."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):  # torch 2.8
        return functools.partial(flex.flex_attention, return_lse=True)

    def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, extra = flex.flex_attention(*args, return_aux=flex.AuxRequest(lse=True), **kwargs)
        return out, extra.lse

    return attend


def require_parameters(function: Callable[..., Any], names: Iterable[str], package: str) -> None:
    """Refuse a function that cannot be called with these keywords.

    Args:
        function: of another package.
        names: the keywords it will be called with.
        package: what it belongs to, as the error names it.

    Raises:
        ConfigError: naming the function, the keywords it lacks and those it demands besides.
    """
    parameters = inspect.signature(function).parameters
    given = set(names)
    lacking = given - parameters.keys()
    demanded = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    } - given
    if lacking or demanded:
        raise ConfigError(
            f"{function.__module__}.{function.__qualname__} of {package} has an unknown form: it "
            f"lacks {sorted(lacking)}, demands {sorted(demanded)}; use a supported version"
        )


def bind_arguments(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by name, however they were given; changes to them show in the call.

    Raises:
        TypeError: the function does not take these arguments, as calling it would raise.
    """
    return inspect.signature(function).bind(*args, **kwargs)
