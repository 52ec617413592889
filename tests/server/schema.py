"""Answers and events against the types that the official clients publish."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter


def conforms(kind: Any, value: Any, also: Iterable[str] = ()) -> Any:
    """`value` as a `kind`, with no required field missing or of another type, and no field that the
    type does not have, except for those in `also`. Returns the parsed value."""
    parsed = _adapter(kind).validate_python(value)
    extras = [path for path in _extras(parsed, "") if path.rpartition(".")[2] not in set(also)]
    assert not extras, f"{extras} are no fields of {kind}"
    return parsed


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Building one for a union of some fifty events takes a second."""
    return TypeAdapter(kind)


def _extras(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield f"{path}.{name}"
        for name in value.model_fields_set & type(value).model_fields.keys():
            yield from _extras(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _extras(item, f"{path}[{place}]")


def sse(text: str) -> list[tuple[str | None, Any]]:
    """(event, data) of each server-sent event."""
    events = []
    for part in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines())
        data = fields["data"]
        events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events
