"""One schema for flags, `QUIRE_*` variables and the YAML file: the fields of the args dataclasses.

A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import typer
import yaml

from quire.cli.help import set_parameters, show_all, type_name
from quire.cli.mistakes import not_one_of
from quire.config import EngineArgs
from quire.errors import ConfigError
from quire.features.registry import clash_error, origin_of_setting
from quire.sampling_params import PARAMETERS, DeclaredParameter
from quire.server.args import ServerArgs
from quire.system import read_bounded


class SamplingArgs(dict[str, Any]):
    """Sampling of the `chat` and `generate` commands: the flags that `SamplingParams` declares.

    A parameter that is absent or None is left to the model.
    """

    def given(self) -> dict[str, Any]:
        """Returns the parameters that are set, as keywords of `SamplingParams`."""
        return {name: value for name, value in self.items() if value not in (None, ())}


SCHEMAS: tuple[type[Any], ...] = (EngineArgs, ServerArgs, SamplingArgs)
"""Everything a settings file may hold. A command ignores the schemas it does not use, so that one
file serves `serve`, `chat` and `bench` alike."""


Args = TypeVar("Args")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A field of a schema, its type taken apart."""

    name: str
    help: str
    default: Any
    kind: Any
    """bool, int, float, str, or a Literal."""
    optional: bool
    repeated: bool
    argument: bool
    json: bool = False
    """Whether it is a mapping, given as JSON."""
    subject: str = ""
    """The panel of the help that shows it; "" for the last one."""
    common: bool = False
    """Whether `--help` shows it, and not only `--help-all`."""

    @property
    def variable(self) -> str:
        return f"QUIRE_{self.name.upper()}"


def settings_of(schema: type[Any]) -> Iterator[Setting]:
    """Yields the settings of a schema: a class of `SCHEMAS`."""
    if schema is SamplingArgs:
        yield from (_sampling_setting(p) for p in PARAMETERS if p.declared.flag)
        return
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if field.metadata.get("internal"):
            continue
        hint, optional, repeated = hints[field.name], False, False
        if typing.get_origin(hint) in (Union, types.UnionType):
            (hint,) = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            optional = True
        if typing.get_origin(hint) is tuple:
            hint, repeated = typing.get_args(hint)[0], True
        mapping = typing.get_origin(hint) is Mapping
        yield Setting(
            field.name,
            field.metadata.get("help", ""),
            field.default,
            str if mapping else hint,
            optional,
            repeated,
            bool(field.metadata.get("argument")),
            mapping,
            field.metadata.get("subject", ""),
            bool(field.metadata.get("common")),
        )


def _sampling_setting(parameter: DeclaredParameter) -> Setting:
    repeated = typing.get_origin(parameter.kind) is tuple
    return Setting(
        parameter.name,
        f"{parameter.summary[:-1]} (may be repeated)." if repeated else parameter.summary,
        () if repeated else None,
        typing.get_args(parameter.kind)[0] if repeated else parameter.kind,
        optional=True,
        repeated=repeated,
        argument=False,
        subject="Sampling",
        common=parameter.declared.flag == "common",
    )


def with_settings(
    *schemas: type[Any], positional: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of the schemas, `--config` and `--help-all`.

    The command's class is `SettingsCommand`.

    The command declares one keyword parameter per schema, named as in `parameter_name`; its other
    parameters stay its own options. Unless `positional`, the model is an option too.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        names = {parameter_name(schema) for schema in schemas}
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name not in names]
        settings = [setting for schema in schemas for setting in settings_of(schema)]
        options = [_parameter(setting, positional) for setting in settings]
        options += [_config_parameter(), _help_all_parameter()]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            flags = {setting.name: values.pop(setting.name) for setting in settings}
            values.pop("help_all")
            file = read_file(values.pop("config"))
            built = {parameter_name(s): build(s, flags, file) for s in schemas}
            return command(**values, **built)

        parameters = own + options
        # Positional arguments come in the order of the signature: the model first.
        parameters.sort(key=lambda p: not _is_argument(p))
        set_parameters(run, parameters)
        # Features' settings, the last of `EngineArgs`, end a panel, so its schema comes last here.
        run.__dict__["settings"] = {
            setting.name: (setting.subject, setting.common)
            for schema in reversed(schemas)
            for setting in settings_of(schema)
        }
        return run

    return decorate


def parameter_name(schema: type[Any]) -> str:
    """Returns the parameter's name: EngineArgs -> engine."""
    return schema.__name__.removesuffix("Args").lower()


def _is_argument(parameter: inspect.Parameter) -> bool:
    infos = typing.get_args(parameter.annotation)[1:]
    return any(isinstance(info, typer.models.ArgumentInfo) for info in infos)


def _parameter(setting: Setting, positional: bool) -> inspect.Parameter:
    """Returns a command's parameter.

    All options default to None, which means: not given on the command line or in the environment,
    so ask the file.
    """
    flag = setting.name.replace("_", "-")
    shown = _shown_default(setting)
    help = setting.help + _choices(setting) + (f" [default: {shown}]" if shown is not None else "")
    info: Any
    if setting.argument and positional:
        info = typer.Argument(
            help=help, envvar=setting.variable, show_default=False, metavar=setting.name.upper()
        )
    else:
        name = f"--{flag}/--no-{flag}" if setting.kind is bool else f"--{flag}"
        info = typer.Option(
            name,
            help=help,
            envvar=setting.variable,
            show_default=False,
            metavar=_metavar(setting),
        )
    kind: Any = types.GenericAlias(list, (setting.kind,)) if setting.repeated else setting.kind
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )


def _metavar(setting: Setting) -> str | None:
    if setting.json or setting.kind is bool:
        return "JSON" if setting.json else None
    return type_name(setting.kind)


_MOST_CHOICES = 24
"""Most values of a setting that its help lists."""


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _choices(setting: Setting) -> str:
    """Returns a sentence with the values that the help does not mention; "" if it has them all."""
    names = [str(name) for name in typing.get_args(setting.kind)]
    if not _is_literal(setting.kind) or all(name in setting.help for name in names):
        return ""
    if len(names) > _MOST_CHOICES:
        return f" The error for an unknown name lists all {len(names)}."
    return f" One of {', '.join(names)}."


def _shown_default(setting: Setting) -> str | None:
    if setting.default is None or setting.default == ():
        return None
    if setting.repeated:
        return ", ".join(setting.default)
    if setting.default == "":
        return None
    if setting.kind is bool:
        return "on" if setting.default else "off"
    return str(setting.default)


def _config_parameter() -> inspect.Parameter:
    info = typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file of settings, named as the flags.",
        envvar="QUIRE_CONFIG",
        show_default=False,
    )
    return inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, info],
    )


def _help_all_parameter() -> inspect.Parameter:
    info = typer.Option(
        "--help-all",
        help="Show this with every setting, and exit.",
        callback=show_all,
        is_eager=True,
        show_default=False,
    )
    return inspect.Parameter(
        "help_all",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, info],
    )


def build(schema: type[Args], flags: Mapping[str, Any], file: Mapping[str, Any]) -> Args:
    """Builds an instance of a schema.

    Args:
        schema: the args dataclass.
        flags: values of flags and variables by setting; None if neither is given.
        file: values of the settings file, used where `flags` has None.
    """
    values = {}
    for setting in settings_of(schema):
        value = flags.get(setting.name)
        if value is None or value == []:
            if setting.name not in file:
                continue
            value = _from_file(setting, file[setting.name])
        if setting.json and isinstance(value, str):
            value = _object(setting.name, value)
        values[setting.name] = tuple(value) if setting.repeated else value
    return schema(**values)


def read_file(path: Path | None) -> dict[str, Any]:
    """Returns the settings in a YAML file, dashes in names turned to underscores.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a key that no schema knows.
    """
    if path is None:
        return {}
    try:
        text = read_bounded(path).decode()
        raw = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"cannot read {path}: {reason}", "config") from None
    # A value that looks like a date may be an invalid date, which raises ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", line {line + 1}"
        raise ConfigError(f"{path} is not valid YAML{where}", "config") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must map names to values", "config")
    known = {setting.name for schema in SCHEMAS for setting in settings_of(schema)}
    settings = {}
    # The library keeps the last of several alike.
    node = yaml.compose(text, yaml.SafeLoader)
    keys = [] if node is None else [key.value for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{path}: {key!r} is set twice", str(key))
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{path}: unknown setting {str(key)!r}.{hint}", str(key))
        if name in settings:
            raise ConfigError(f"{path}: {name!r} is set twice", name)
        settings[name] = value
    return settings


def _from_file(setting: Setting, value: Any) -> Any:
    if value is None and (setting.optional or setting.repeated):
        return () if setting.repeated else None
    if setting.repeated:
        items = value if isinstance(value, list) else [value]
        return [_scalar(setting, item) for item in items]
    return _scalar(setting, value)


def _object(name: str, text: str) -> dict[str, Any]:
    """Returns the JSON object that a text is. Raises ConfigError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}", name) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text}", name)
    return found


def _scalar(setting: Setting, value: Any) -> Any:
    """Checks a value of the file against its type. Only an integer for a float is converted."""
    kind = setting.kind
    if setting.json and isinstance(value, dict):
        return value
    if _is_literal(kind):
        if value in typing.get_args(kind):
            return value
        raise not_one_of(setting.name, value, typing.get_args(kind))
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is not kind:
        expected = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a text")
        raise ConfigError(f"{setting.name} must be {expected}, got {value!r}", setting.name)
    return value


def check_names(engine: type[EngineArgs]) -> None:
    """Raises ConfigError if a feature's setting has the name of another command's setting."""
    others = {each.name for schema in (ServerArgs, SamplingArgs) for each in settings_of(schema)}
    for field in dataclasses.fields(engine):
        if field.name in others:
            raise clash_error("setting", field.name, "the server", origin_of_setting(field.name))


check_names(EngineArgs)
