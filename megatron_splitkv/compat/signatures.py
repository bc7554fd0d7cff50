"""Whether a function of another package can be called as we mean to, and with what."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_splitkv.config import ConfigError


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


def first_known_parameter(function: Callable[..., Any], names: Iterable[str], package: str) -> str:
    """The first of a keyword's names, newest first, that a function takes.

    Args:
        function: of another package.
        names: what the keyword is and was called.
        package: what the function belongs to, as the error names it.

    Raises:
        ConfigError: it takes none of them.
    """
    names, parameters = list(names), inspect.signature(function).parameters
    for name in names:
        if name in parameters:
            return name
    raise ConfigError(
        f"{function.__module__}.{function.__qualname__} of {package} has an unknown form: it takes "
        f"none of {names}; use a supported version"
    )


def bind_arguments(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by name, however they were given; changes to them show in the call.

    Raises:
        TypeError: the function does not take these arguments, as calling it would raise.
    """
    return inspect.signature(function).bind(*args, **kwargs)
