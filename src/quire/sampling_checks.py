"""Checks of sampling parameters that few requests have, imported by the first that has one."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from typing import Any

from quire.checks import MAX_BIAS_ENTRIES, MAX_STOP_TOKENS, between, integer, wrong_type
from quire.errors import RequestError
from quire.token_rules import check_token_rules

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
_INT32_MAX = 2**31 - 1


def check_lists(params: Any) -> None:
    """Checks the lists of `SamplingParams`. Raises RequestError naming the field."""
    _check_stops(params.stop, params.detokenize)
    for name in ("stop_token_ids", "dry_breaker_ids"):
        tokens: Sequence[int] = getattr(params, name)
        _at_most(name, tokens, MAX_STOP_TOKENS)
        for token in tokens:
            integer(name, token, 0, _INT32_MAX)
    if params.logit_bias is not None:
        _check_bias(params.logit_bias)
    if not all(map(callable, params.logits_processors)):
        raise wrong_type("logits_processors", "a list of functions", params.logits_processors)
    check_token_rules(params.allowed_token_ids, params.bad_token_ids)


def _check_stops(stop: Sequence[object], detokenize: bool) -> None:
    _at_most("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string must be a string of 1 to {MAX_STOP_LENGTH} characters",
                param="stop",
            )
    if stop and not detokenize:
        raise RequestError("stop strings need detokenize=True", param="stop")


def _check_bias(bias: object) -> None:
    if not isinstance(bias, dict):
        raise wrong_type("logit_bias", "a dict of token ids and numbers", bias)
    _at_most("logit_bias", bias, MAX_BIAS_ENTRIES)
    for token, value in bias.items():
        integer("logit_bias", token, 0, _INT32_MAX)
        between("logit_bias", value, -100.0, 100.0)


def check_structured(given: dict[object, object], fields: Collection[str]) -> None:
    """Checks the names of a dict of structured outputs. Raises RequestError."""
    for name in given:
        if name not in fields:
            raise RequestError(
                f"structured_outputs has no field {name!r}; known are: {', '.join(fields)}",
                param="structured_outputs",
            )


def _at_most(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries, at most {most} are allowed", name)
