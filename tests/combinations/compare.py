"""Compares a request's results with those it gets alone."""

from __future__ import annotations

import math

from tests.combinations.draw import Asked
from tests.combinations.play import Alternatives, Answer, Choice

_CLOSE = 1e-4


def difference(asked: Asked, alone: Answer, found: Answer) -> str:
    """Returns a description of the first difference, or nothing. An aborted request has only the
    beginning of the results."""
    if alone.refused != found.refused:
        return f"refused: {found.refused!r}, alone {alone.refused!r}"
    for index, (one, other) in enumerate(zip(alone.choices, found.choices, strict=True)):
        stopped = asked.leaves is not None and asked.whose in (None, index)
        what = _choice(one, other, stopped)
        if what:
            return f"completion {index}: {what}"
    if asked.leaves is None and alone.failure != found.failure:
        return f"failure: {found.failure!r}, alone {alone.failure!r}"
    if asked.leaves is None:
        what = _entries(alone.prompt_logprobs, found.prompt_logprobs)
        if what:
            return f"prompt_logprobs: {what}"
    if asked.pooling is not None and asked.leaves is None:
        pairs = zip(alone.vector or (), found.vector or (), strict=True)
        if not found.vector or not all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs):
            return f"vector {found.vector}, alone {alone.vector}"
    if found.cached >= max(1, len(asked.prompt)):
        return f"{found.cached} cached tokens of {len(asked.prompt)}"
    return ""


def _choice(alone: Choice, found: Choice, stopped: bool) -> str:
    if stopped and found.finish is None:
        count = len(found.tokens)
        if alone.tokens[:count] != found.tokens:
            return f"tokens {found.tokens}, alone {alone.tokens}"
        if not alone.text.startswith(found.text):
            return f"text {found.text!r}, alone {alone.text!r}"
        return _entries((alone.logprobs or [])[:count], found.logprobs or [])
    for name in ("tokens", "text", "finish", "stop"):
        if getattr(alone, name) != getattr(found, name):
            return f"{name} {getattr(found, name)!r}, alone {getattr(alone, name)!r}"
    return _entries(alone.logprobs, found.logprobs)


def _entries(
    alone: list[Alternatives] | list[Alternatives | None] | None,
    found: list[Alternatives] | list[Alternatives | None] | None,
) -> str:
    if alone is None or found is None:
        return "" if alone is found else f"{found}, alone {alone}"
    if len(alone) != len(found):
        return f"{len(found)} entries, alone {len(alone)}"
    for place, (one, other) in enumerate(zip(alone, found, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"at {place} {other}, alone {one}"
        elif not _like(one, other):
            return f"at {place} {other}, alone {one}"
    return ""


def _like(alone: Alternatives, found: Alternatives) -> bool:
    """Returns whether values agree; nearly equal alternatives may be in another order."""
    if next(iter(alone)) != next(iter(found)) or len(alone) != len(found):
        return False
    pairs = zip(
        sorted(v for v, _ in alone.values()), sorted(v for v, _ in found.values()), strict=True
    )
    return all(a == b or math.isclose(a, b, abs_tol=_CLOSE) for a, b in pairs)
