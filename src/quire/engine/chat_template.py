"""Chat templates: sandboxed Jinja, rendered as `transformers` renders them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import RequestError

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 64_000_000
MAX_SECONDS = 10.0
_MAX_EXPONENT = 64
_DEADLINE = "deadline__"
"""Variable of a rendering that holds the moment at which it must be done."""


_FAILURES = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors of templates, which index, add and call any value."""


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012  (the name and kind are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds a template's time and memory.

    The bounds are against loops in loops, and against operators that make large values of small
    ones.
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template; every round of a loop begins with a call, and so with a check of the
        time."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        return template

    @staticmethod
    def tick() -> None:
        """Does nothing; calling it checks the time."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_time(__context)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_time(context)
        if operator == "+":
            if _size(left) + _size(right) > MAX_OUTPUT_CHARS:
                raise jinja2.TemplateError("a sum is too large")
        elif operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > _MAX_EXPONENT:
                raise jinja2.TemplateError(f"an exponent may be at most {_MAX_EXPONENT}")
        elif max(_size(left) * _factor(right), _size(right) * _factor(left)) > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateError("a repeated value is too large")
        return super().call_binop(context, operator, left, right)


def _check_time(context: Context) -> None:
    if time.monotonic() > context.get(_DEADLINE, float("inf")):
        raise jinja2.TemplateError("it took too long")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _factor(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML, which prompts must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Says how a chat template takes tools and calls, see `template_traits.probe`.

    Attributes:
        shows_tools, shows_calls: tools and calls reach the prompt.
        needs_description: a tool without a description cannot be shown.
        arguments_as_text: calls' arguments are JSON text, not an object.
        empty_content: content of a message with calls alone.
    """

    shows_tools: bool
    shows_calls: bool
    needs_description: bool = False
    arguments_as_text: bool = False
    empty_content: str | None = ""


class ChatTemplate:
    """A compiled template. `render` raises RequestError for any error in the template."""

    def __init__(self, source: str, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError("the chat template is too large", "chat_template")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
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
        """Returns the rendered text. Absent `tools` and `documents` are None, as templates
        expect."""
        named = [_with_thinking(message) for message in messages]
        context = {"tools": None, "documents": None, **variables, "messages": named}
        context[_DEADLINE] = deadline = time.monotonic() + self._seconds
        size, parts = 0, []
        try:
            for part in self._template.generate(**context):
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise RequestError("the chat template's output is too large", "messages")
                if time.monotonic() > deadline:
                    raise RequestError("the chat template took too long", "messages")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused: {error}", "messages") from error
        except _FAILURES as error:
            raise RequestError(f"the chat template failed: {error}", "messages") from error
        return "".join(parts)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its reasoning under both names that templates use."""
    if message.get("reasoning_content") is None:
        return message
    return {"thinking": message["reasoning_content"], **message}


def load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a folder's templates by name: "default", and if there is one "tool_use".

    A file `chat_template.jinja` goes before those of tokenizer_config.json; more may be in
    `additional_chat_templates/`.
    """
    found: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        found["default"] = template
    elif isinstance(template, list):
        found = {entry["name"]: entry["template"] for entry in template}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text("utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text("utf-8")
    return found
