"""Chat templates: Jinja in a sandbox, rendered in the same way as by `transformers`."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.errors import RequestError
from quire.system import read_bounded

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 64_000_000
MAX_SECONDS = 10.0
MAX_WORK_BYTES = 1_000_000_000
"""Limit for the bytes of all texts and lists that one rendering creates."""
UNSAFE = "unsafe_template"
"""Error code if the sandbox refuses a template."""
_MAX_EXPONENT = 64
_MAX_NUMBER = 1_000_000
"""Largest width, indent or count that a filter or a string method accepts."""
_MAX_INDENT = 64
"""Largest indent of JSON, and longest separator."""
_WIDTH = re.compile(r"[0-9]{7}|\*")
"""Matches a width above `_MAX_NUMBER`, or a width that is an argument."""


@dataclass(slots=True)
class _Budget:
    """The time and memory that one rendering may still use.

    Attributes:
        deadline: when the rendering must end.
        work: bytes of texts and lists that it may still create.
    """

    deadline: float
    work: int = MAX_WORK_BYTES

    def spend(self, size: int) -> None:
        self.work -= size
        if self.work < 0:
            raise jinja2.TemplateError("it makes too much text")
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateError("it took too long")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
"""The budget of the rendering in this thread. Templates cannot access it."""


_FAILURES = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""Errors that a template may cause, because it can index, add and call any value."""


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  (the name and kind are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also limits a template's time and memory.

    The limits stop nested loops, and operators that make large values from small ones.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template. Inserts a call of `tick` at the start of each loop's body, because
        calls check the time."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        result: nodes.Template = _ConcatCalls().visit(template)
        return result

    @staticmethod
    def tick() -> None:
        """Does nothing. The sandbox checks the time whenever a template calls it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _spend(0)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_method(owner, method.__name__, args, kwargs)
        return _spent(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _spend(0)
        if operator == "%":
            if isinstance(left, (str, bytes)):
                _check_width(left)
        elif operator == "+":
            if _size(left) + _size(right) > MAX_OUTPUT_CHARS:
                raise jinja2.TemplateError("a sum is too large")
        elif operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > _MAX_EXPONENT:
                raise jinja2.TemplateError(f"an exponent may be at most {_MAX_EXPONENT}")
        elif max(_size(left) * _factor(right), _size(right) * _factor(left)) > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateError("a repeated value is too large")
        return _spent(super().call_binop(context, operator, left, right))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a block, a macro or `~`."""
        joined = list(parts)
        if sum(map(len, joined)) > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateError("a text is too large")
        text = "".join(joined)
        _spend(sys.getsizeof(text))
        return text

    @staticmethod
    def concat_values(*values: Any) -> str:
        """Computes the operator `~`."""
        return _Environment.concat(map(str, values))


class _ConcatCalls(NodeTransformer):
    """Replaces the operator `~` by a call, because a sandbox cannot intercept the operator."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  (the name is Jinja's)
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("concat_values")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


def _spend(size: int) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.spend(size)


def _spent(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _spend(sys.getsizeof(value))
    return value


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise jinja2.TemplateError(f"a number may be at most {_MAX_NUMBER} there")


def _check_width(format: str | bytes) -> None:
    text = format if isinstance(format, str) else format.decode("latin-1")
    if _WIDTH.search(text):
        raise jinja2.TemplateError("a width is too large, or is given as an argument")


def _check_method(
    owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuses a call of a string method that would make a large value from small ones."""
    given = [*args, *kwargs.values()]
    _check_numbers(given)
    if name in ("format", "format_map"):
        if isinstance(owner, str) and (_WIDTH.search(owner) or re.search(r":[^{}]*\{", owner)):
            raise jinja2.TemplateError("a width is too large, or is given as an argument")
    elif name == "replace":
        _check_replace(owner, given)
    elif name == "join" and given and isinstance(given[0], (list, tuple)):
        _check_join(given[0], len(owner))
    elif name == "translate":
        raise jinja2.TemplateError("translate is not supported")


def _check_replace(text: Any, given: Sequence[Any]) -> None:
    """Refuses a replacement whose result may be too large. Each character of `text` may be replaced
    by the new part."""
    if len(given) > 1 and (_size(text) + 1) * max(1, _size(given[1])) > MAX_OUTPUT_CHARS:
        old, new = given[0], given[1]
        if not isinstance(text, str) or not isinstance(old, str) or not isinstance(new, str):
            raise jinja2.TemplateError("a replaced text is too large")
        if len(text) + text.count(old) * max(0, len(new) - len(old)) > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateError("a replaced text is too large")


def _check_join(parts: Sequence[Any], between: int) -> None:
    if sum(map(_size, parts)) + between * len(parts) > MAX_OUTPUT_CHARS:
        raise jinja2.TemplateError("a joined text is too large")


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that refuses to make a large value from small ones."""
    skipped = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, *given = [*args[skipped:], *kwargs.values()] or [None]
        _check_numbers(given)
        if name == "format" and isinstance(value, (str, bytes)):
            _check_width(value)
        elif name == "replace":
            _check_replace(value, given)
        elif name == "join" and isinstance(value, (list, tuple)):
            _check_join(value, _size(given[0]) if given else 0)
        elif name == "indent" and isinstance(value, str) and given:
            width = given[0] if isinstance(given[0], int) else _size(given[0])
            if (value.count("\n") + 1) * width > MAX_OUTPUT_CHARS:
                raise jinja2.TemplateError("an indented text is too large")
        return _spent(filter(*args, **kwargs))

    return call


def _size(value: Any) -> int:
    """Returns the size of a value: characters of a text, or 8 for each item of a list."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 0


def _factor(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    for size in (indent, *(separators or ())):
        if (len(size) if isinstance(size, str) else size or 0) > _MAX_INDENT:
            raise jinja2.TemplateError(f"an indent or separator may be at most {_MAX_INDENT} long")
    # Jinja's own filter is not used because it escapes HTML characters, which would alter prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The way in which a chat template handles tools and tool calls, see `template_traits.probe`.

    Attributes:
        shows_tools: whether tools are written to the prompt.
        shows_calls: whether tool calls are written to the prompt.
        needs_description: whether every tool needs a description.
        arguments_as_text: whether a call's arguments must be JSON text instead of an object.
        empty_content: the content that a message with only calls must have.
        call: the text of a message with one call. None if the template does not show calls.
        ids_name_tools: whether the template shows only the ids of calls. An id must then contain
            the tool's name.
        error: why the sandbox refuses the template, if it shows no tools or no calls.
        late_system: whether a system message after other messages is written to the prompt.
    """

    shows_tools: bool
    shows_calls: bool
    needs_description: bool = False
    arguments_as_text: bool = False
    empty_content: str | None = ""
    call: str | None = None
    ids_name_tools: bool = False
    error: str | None = None
    late_system: bool = True


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja.
        seconds: time limit of a rendering.

    Raises:
        RequestError: the template is too large or not valid.
    """

    def __init__(self, source: str, seconds: float = MAX_SECONDS) -> None:
        self.source = source
        self._seconds = seconds
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError("the chat template is too large", "chat_template")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        for name, filter in environment.filters.items():
            environment.filters[name] = _bounded(name, filter)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestError(
                f"the chat template is not valid: {error}", "chat_template"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the rendered text.

        Args:
            messages: the conversation.
            variables: variables of the template. `tools` and `documents` are None by default, as
                templates expect.

        Raises:
            RequestError: the template refuses the messages, fails, or exceeds a limit.
        """
        named = [_with_thinking(message) for message in messages]
        context = {"tools": None, "documents": None, **variables, "messages": named}
        budget = _Budget(time.monotonic() + self._seconds)
        size, parts = 0, []
        token = _budget.set(budget)
        try:
            for part in self._template.generate(**context):
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise RequestError("the chat template's output is too large", "messages")
                budget.spend(0)
                parts.append(part)
        except SecurityError as error:
            raise RequestError(
                f"the sandbox refused the chat template: {error} As in transformers, it lets a "
                "template change no list; --chat-template takes another one",
                "messages",
                UNSAFE,
            ) from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused: {error}", "messages") from error
        except _FAILURES as error:
            raise RequestError(f"the chat template failed: {error}", "messages") from error
        finally:
            _budget.reset(token)
        return "".join(parts)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its reasoning under both keys that templates use."""
    if message.get("reasoning_content") is None:
        return message
    return {"thinking": message["reasoning_content"], **message}


def load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a folder's chat templates by name: "default", and perhaps "tool_use".

    The file `chat_template.jinja` takes precedence over tokenizer_config.json. The folder
    `additional_chat_templates/` may hold further templates.
    """
    found: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        found["default"] = template
    elif isinstance(template, list):
        found = {entry["name"]: entry["template"] for entry in template}
    file = folder / "chat_template.jinja"
    if file.exists():
        found["default"] = read_bounded(file).decode()
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = read_bounded(file).decode()
    return found
