"""The one place that knows how Megatron-core's releases differ.

Supported: megatron-core 0.18.2 up to, not including, 0.20. What differs is found by looking at the
installed code, and named in a `ConfigError` when it is none of the known forms.
"""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
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
    require_parameters(training.pretrain, arguments)
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


def require_parameters(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse a function of Megatron that cannot be called with these keywords.

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
            f"{function.__module__}.{function.__qualname__} of megatron-core "
            f"{megatron_core_version()} has an unknown form: it lacks {sorted(lacking)}, demands "
            f"{sorted(demanded)}; use a supported version"
        )
