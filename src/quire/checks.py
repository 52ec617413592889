"""Limits, and checks of values that users give: each raises RequestError naming the field."""

from __future__ import annotations

import math

from quire.errors import RequestError

MAX_STOP_TOKENS = 256
MAX_BIAS_ENTRIES = 1024


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r}", param=name)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)


def between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An int is finite, however large; asking a very large one would overflow a float.
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if not (low < value <= high if open_low else low <= value <= high):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


def integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    between(name, value, low, high)
