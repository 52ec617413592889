"""Outcomes of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not offered"]


class FailedError(Exception):
    """A check found the server wrong. The message says in what."""


class NotOfferedError(Exception):
    """A check cannot be made, as the server does not take the field that it needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what became of one check on one route.

    Attributes:
        route: "chat" or "completions".
        detail: the comparison made, the fault found, or the reason for not checking.
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
        name: of the value, as in "text".
        places: where they are from, as in "the first and the second answer".
    """
    if first == second:
        return
    if name in ("text", "reasoning") and isinstance(first, str) and isinstance(second, str):
        pairs = enumerate(zip(first, second, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
        first, second = first[at : at + 20], second[at : at + 20]
        name += f" from character {at} on"
    raise FailedError(f"{places} differ in {name}: {first!r} and {second!r}")
