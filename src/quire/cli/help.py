"""Groups that import a command on demand, options that are a class's fields, and their help."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from quire.cli.mistakes import from_variable, value_error, variable_of
from quire.config import EngineArgs
from quire.errors import ConfigError, RequestError


def with_options(options: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a command's parameter of a class by one option for each field of the class.

    Args:
        options: a dataclass whose fields are annotated as a command's parameters are.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = inspect.signature(options, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        taken = ""
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.annotation is options:
                taken = parameter.name
                parameters += fields.values()
            else:
                parameters.append(parameter)

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in fields}
            return command(**values, **{taken: options(**given)})

        set_parameters(run, parameters)
        return run

    return decorate


def set_parameters(run: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Makes a function that stands for a command show these parameters instead of its own."""
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__dict__["__wrapped__"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of commands that look at a model's layers without starting an engine."""

    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id.", show_default=False)
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="auto (the checkpoint's), float32, float16 or bfloat16."),
    ] = "auto"
    quantization: Annotated[
        str | None, typer.Option(help="As of quire serve. Default: as the checkpoint.")
    ] = None
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "--tp", min=1, help="GPUs that share each layer."),
    ] = 1
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None

    def engine(self) -> EngineArgs:
        """Returns the settings of an engine with this model, on a CPU."""
        return EngineArgs.from_kwargs(**vars(self), device="cpu")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The option of commands that print a table or JSON."""

# The help of commands with many settings: those most people need, or all of them, by subject.

_SHOW_ALL = "quire.help_all"


SUBJECTS = (
    "Model", "Address", "Access", "API", "Device and memory", "Scheduling", "Images",
    "Speculative decoding", "Kernels", "Processes", "Prefill and decode apart", "Watching",
    "Sampling",
)  # fmt: skip
"""The panels of the help, in order. Each setting names its own where it is declared."""

_OWN = "Options"
_REST = "Other settings"
_LAST = ("config", "help_all", "help")
"""Options that every command has."""


class SettingsCommand(TyperCommand):
    """A command whose help names types, and whose errors name the flag or the variable.

    With settings (see `with_settings`) `--help` is short, and `--help-all` is whole.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises ConfigError, in words of our own, for a value that is not of its type."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            mistake = value_error(self, ctx, given, error, self._kinds())
            if mistake is None:
                raise
            raise mistake from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, RequestError) as error:
            if not error.param or not from_variable(ctx, error.param):
                raise
            option = next(each for each in self.params if each.name == error.param)
            raise ConfigError(f"{variable_of(option)}: {error}", error.param) from None

    def _kinds(self) -> dict[Any, tuple[Any, Any]]:
        """Returns the type of each parameter's values and its declaration, by the parameter's
        name."""
        if self.callback is None:
            return {}
        found: dict[Any, tuple[Any, Any]] = {}
        for parameter in inspect.signature(self.callback, eval_str=True).parameters.values():
            kind, *more = get_args(parameter.annotation) or (parameter.annotation,)
            while get_origin(kind) in (Union, types.UnionType, list):
                kind = next(each for each in get_args(kind) if each is not type(None))
            found[parameter.name] = kind, more[0] if more else None
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        full = bool(ctx.meta.get(_SHOW_ALL))
        settings = _settings_of(self)
        kinds = self._kinds()
        console = Console(highlight=False)
        _print_purpose(console, self, ctx)
        for title, options in self._panels(ctx, full):
            table = _table([_row(option, kinds, settings) for option in options])
            console.print(Panel(table, title=title, title_align="left"))
        if not settings:
            return
        if not full:
            console.print("--help-all shows every setting.", markup=False)
        console.print(
            "A setting is also a variable (--max-num-seqs: QUIRE_MAX_NUM_SEQS) and a key of the "
            "file (max_num_seqs). A flag wins over a variable, a variable over the file.",
            markup=False,
        )

    def _panels(self, ctx: Any, full: bool) -> Iterator[tuple[str, list[Any]]]:
        options = {option.name: option for option in self.get_params(ctx)}
        settings = _settings_of(self)
        own = [o for name, o in options.items() if name not in settings and name not in _LAST]
        if own:
            yield _OWN, own
        for title in SUBJECTS:
            common = [n for n, (subject, first) in settings.items() if subject == title and first]
            more = [n for n, (subject, first) in settings.items() if subject == title and not first]
            found = [options[name] for name in (*common, *(more if full else ()))]
            if found:
                yield title, found
        rest = [o for n, o in options.items() if n in settings and settings[n][0] not in SUBJECTS]
        if full and rest:
            yield _REST, rest
        last = [options[name] for name in _LAST if name in options]
        yield "Help and files" if settings else "Help", last


def _settings_of(command: TyperCommand) -> Mapping[str, tuple[str, bool]]:
    """Returns a command's settings by name: their panels, and whether `--help` shows them."""
    found: Mapping[str, tuple[str, bool]] = getattr(command.callback, "settings", {})
    return found


@dataclass(frozen=True, slots=True)
class Command:
    """Names a command's function and says what it is for.

    Attributes:
        function: the function that runs it, as "module:name".
        summary: one line, in the help of the group and of the command.
        details: a second paragraph for the help of the command.
    """

    function: str
    summary: str
    details: str = ""


class LazyCommands(Mapping[str, Any]):
    """A group's commands by name. The first access to one imports its module.

    Args:
        table: a name's command, or its group.
    """

    def __init__(self, table: Mapping[str, Command | typer.Typer]) -> None:
        self.table = table
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self.table[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def summary(self, name: str) -> str:
        """Returns a command's line of help, without an import."""
        entry = self.table[name]
        return str(entry.info.help) if isinstance(entry, typer.Typer) else entry.summary

    def _load(self, name: str, entry: Command | typer.Typer) -> Any:
        if isinstance(entry, typer.Typer):
            return typer.main.get_group(entry)
        module, function = entry.function.split(":")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        text = f"{entry.summary}\n\n{entry.details}".strip()
        alone.command(name, cls=SettingsCommand, help=text)(
            getattr(import_module(module), function)
        )
        return typer.main.get_command(alone)


def command_group(name: str, help: str, table: Mapping[str, Command | typer.Typer]) -> typer.Typer:
    """Returns a group of commands whose modules are imported on demand."""

    class Group(CommandGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings | {"commands": LazyCommands(table)})

    return typer.Typer(
        name=name,
        cls=Group,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


class CommandGroup(TyperGroup):
    """A group whose help looks like that of its commands."""

    commands: Any

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names alone: Typer's own method would import every command."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console(highlight=False)
        _print_purpose(console, self, ctx)
        rows = [(name, self.commands.summary(name)) for name in self.list_commands(ctx)]
        console.print(Panel(_table(rows), title="Commands", title_align="left"))
        options = [_row(option, {}, ()) for option in self.get_params(ctx)]
        console.print(Panel(_table(options), title=_OWN, title_align="left"))


def _print_purpose(console: Console, command: Any, ctx: Any) -> None:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    console.print(f"Usage: {ctx.command_path} {pieces}", markup=False)
    for paragraph in (command.help or "").split("\n\n"):
        console.print(f"\n{' '.join(paragraph.split())}", markup=False)
    console.print()


def show_all(ctx: typer.Context, value: bool) -> None:
    """Prints the whole help and ends the command: the callback of `--help-all`."""
    if value:
        ctx.meta[_SHOW_ALL] = True
        ctx.get_help()
        raise typer.Exit


def type_name(kind: Any) -> str:
    """Returns the word for a type in the help."""
    if get_origin(kind) is Literal:
        return "NAME"
    return {int: "INT", float: "NUMBER", Path: "FILE"}.get(kind, "TEXT")


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _row(
    option: Any, kinds: dict[Any, tuple[Any, Any]], settings: Container[str]
) -> tuple[str, str]:
    """Returns an option's names and its text."""
    kind, _ = kinds.get(option.name, (bool, None))
    text = _help(option)
    # A setting's variable has the setting's name, as the end of the help says.
    if option.envvar and option.name not in settings and option.name not in _LAST:
        text += f" [variable: {option.envvar}]"
    return _names(option, kind), text


def _names(option: Any, kind: Any) -> str:
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper())
    flags = sorted(option.opts, key=len, reverse=True)
    if option.is_flag:
        (long, *short) = flags
        (other,) = option.secondary_opts or ("",)
        both = f"--[no-]{long[2:]}" if other == f"--no-{long[2:]}" else f"{long}/{other}"
        return ", ".join((both if other else long, *short))
    return f"{', '.join(flags)} {option.metavar or type_name(kind)}"


def _help(option: Any) -> str:
    """Returns an option's help text with its default. A setting's text ends in the default
    already."""
    text = str(option.help or "")
    if option.param_type_name == "argument" or option.is_flag:
        return text
    if option.required:
        return f"{text} [required]"
    default = option.default
    if default is None or "[default" in text:
        return text
    return f"{text} [default: {default}]"
