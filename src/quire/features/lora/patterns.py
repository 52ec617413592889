"""The tables `rank_pattern` and `alpha_pattern` of an adapter's config, with values of modules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from quire.errors import RequestError

_MOST_PATTERNS = 4096
_SECONDS = 10.0
"""Seconds within which all patterns of a table must be compiled and matched."""


class ModulePatterns:
    """A table of patterns, each with the value of the modules that it matches.

    As in PEFT, a pattern is a regular expression for the whole name of a module or its end after a
    dot, and the first pattern that matches counts. An adapter may come from an untrusted source. So
    Rust's `regex` (in pydantic) runs the expressions, in time linear in the name. It has no
    backreferences and no lookaround.

    Args:
        name: the table's key in the config.

    Raises:
        RequestError: there are too many patterns, one is malformed, or they take too long.
    """

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        if len(table) > _MOST_PATTERNS:
            raise _wrong(f"{name} has {len(table)} patterns, more than {_MOST_PATTERNS}")
        self._name = name
        self._deadline = time.monotonic() + _SECONDS
        self._patterns = [(self._compiled(pattern), value) for pattern, value in table.items()]

    def _compiled(self, pattern: str) -> SchemaValidator:
        self._check_time()
        try:
            # The pattern must be valid by itself: "a)|(b" is valid only within the parentheses.
            for expression in (pattern, rf"^(.*\.)?({pattern})$"):
                compiled = SchemaValidator(core_schema.str_schema(pattern=expression))
        except (SchemaError, UnicodeError):
            raise _wrong(
                f"{self._name}: the pattern {pattern[:100]!r} is malformed, too large, or has a "
                "backreference or lookaround, which are not supported"
            ) from None
        return compiled

    def value(self, module: str, default: Any) -> Any:
        """Returns the value of the first pattern that matches a module's name.

        Raises:
            RequestError: the patterns have taken too long.
        """
        self._check_time()
        for compiled, value in self._patterns:
            if compiled.isinstance_python(module):
                return value
        return default

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _wrong(f"{self._name}: its patterns take more than {_SECONDS:g} s")


def _wrong(message: str) -> RequestError:
    return RequestError(f"adapter_config.json: {message}", "lora_path", "invalid_adapter")
