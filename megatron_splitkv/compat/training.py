"""Megatron's argument parser, global state and ``pretrain()``, whose forms differ by release."""

import argparse
import contextlib
import importlib
import importlib.util
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.compat.environment import megatron_core_version
from megatron_splitkv.compat.signatures import require_parameters
from megatron_splitkv.config import ConfigError


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

    It would end by printing all of them, hundreds of lines that hide an error found later;
    `publish_args` does that.

    Raises:
        ConfigError: with the reason of Megatron's assertion.
    """
    arguments = importlib.import_module("megatron.training.arguments")
    names = vars(arguments)
    print_args = names["_print_args"]
    names["_print_args"] = lambda *_: None
    try:
        with _megatrons_refusals():
            arguments.validate_args(args)
    finally:
        names["_print_args"] = print_args


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
    """Print the arguments, make them global and build what hangs on them: timers, TensorBoard.

    No tokenizer: tokens come from the feature store, and Megatron's tokenizers import transformers.
    """
    vars(importlib.import_module("megatron.training.arguments"))["_print_args"]("arguments", args)
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
