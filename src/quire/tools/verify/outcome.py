"""Outcomes of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not offered"]


class FailedError(Exception):
    """A check found an error of the server. The message describes it."""


class NotOfferedError(Exception):
    """A check cannot be made, because the server does not support a field that it needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check on one route.

    Attributes:
        check: name of the check.
        route: "chat" or "completions".
        status: whether the check passed, failed or was not made.
        detail: what was compared, what was wrong, or why the check was not made.
        seen_in: issues of other projects that describe the bug, as "project#number".
    """

    check: str
    route: str
    status: Status
    detail: str
    seen_in: tuple[str, ...] = ()


def require(true: bool, otherwise: str) -> None:
    """Raises FailedError with the message `otherwise` unless `true`."""
    if not true:
        raise FailedError(otherwise)


def require_same(name: str, first: object, second: object, places: str) -> None:
    """Raises FailedError unless both are equal.

    Args:
        name: name of the value, such as "text".
        places: the sources of both values, such as "the first and the second answer".
    """
    if first == second:
        return
    if name in ("text", "reasoning") and isinstance(first, str) and isinstance(second, str):
        pairs = enumerate(zip(first, second, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
        first, second = first[at : at + 20], second[at : at + 20]
        name += f" from character {at} on"
    raise FailedError(f"{places} differ in {name}: {first!r} and {second!r}")
