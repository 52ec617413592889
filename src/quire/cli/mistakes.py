"""Errors of values on the command line and in variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from quire.errors import ConfigError

_SYNONYMS = {
    "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32", "float": "float32", "f32": "float32",
}  # fmt: skip
"""Names that other programs have for a dtype."""


def not_one_of(
    name: str, value: object, allowed: Sequence[str], param: str | None = None
) -> ConfigError:
    """Returns the error for a value that is not allowed, with the likely intended one.

    Args:
        name: the setting, as its user wrote it.
        value: what it was set to.
        allowed: what it may be set to.
        param: the setting's field, if not `name`.
    """
    text = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
    meant = _SYNONYMS.get(str(value).lower())
    if meant in allowed:
        text += f": use {meant}"
    elif close := difflib.get_close_matches(str(value), allowed, n=1):
        text += f": did you mean {close[0]}?"
    return ConfigError(text, param or name)


def value_error(
    command: Any,
    ctx: Any,
    args: Sequence[str],
    error: Any,
    kinds: Mapping[str, tuple[Any, Any]],
) -> ConfigError | None:
    """Returns the error for a value of a wrong type; None: the library's own message suffices.

    Args:
        command: the command that was given.
        ctx: its context, which knows the source of each value.
        args: the command line.
        error: the library's `BadParameter`.
        kinds: by name of a parameter, the type of its values and its declaration.
    """
    option = error.param
    kind, info = kinds.get(getattr(option, "name", ""), (None, None))
    if kind not in (bool, int, float) and get_origin(kind) is not Literal:
        return None
    if from_variable(ctx, option.name):
        name = variable_of(option)
        value: Any = os.environ.get(name)
    else:
        name = max(option.opts, key=len)
        value = command.make_parser(ctx).parse_args(list(args))[0].get(option.name)
    if value is None:
        return None
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((each for each in values if not _fits(each, kind, info)), values[-1])
    if get_origin(kind) is Literal:
        return not_one_of(name, wrong, get_args(kind), option.name)
    wanted = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    return ConfigError(f"{name} must be {wanted}{_range(info)}, got {wrong!r}", option.name)


def from_variable(ctx: Any, name: str) -> bool:
    """Whether a parameter's value is from the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def variable_of(option: Any) -> str:
    """Returns the variable that an option's value is from."""
    names = option.envvar
    if isinstance(names, str):
        return names
    return next(str(name) for name in names if name in os.environ)


def _fits(value: Any, kind: Any, info: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is bool:
        return False
    try:
        number = kind(value)
    except ValueError:
        return False
    low, high = getattr(info, "min", None), getattr(info, "max", None)
    return (low is None or number >= low) and (high is None or number <= high)


def _range(info: Any) -> str:
    low, high = getattr(info, "min", None), getattr(info, "max", None)
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if low is not None:
        return f" of at least {low:g}"
    return "" if high is None else f" up to {high:g}"
