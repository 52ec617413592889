"""The model of an engine: what a step takes, and what fits."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.system import read_bounded


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of an engine, as `quire simulate --calibrate` measures them.

    Attributes:
        step_seconds: pairs of a number of generating rows and a step's seconds. Values in between
            are interpolated, values beyond the last pair extrapolated. A step without generating
            rows takes as long as one with a single row.
        prompt_token_seconds: added for each prompt token.
        context_token_seconds: added for each token that a generating row attends to.
        prompt_pair_seconds: added for each pair of a prompt token and a token it attends to.
        request_seconds: a request's time outside of steps: tokenizing, HTTP.
        max_tokens: the most tokens of a step.
        max_rows: the most rows of a step.
        kv_tokens: tokens that the KV cache has room for.
        handover_seconds: for each prompt that another replica computed.
        handover_token_seconds: for each token of such a prompt.
    """

    step_seconds: tuple[tuple[int, float], ...] = ((1, 4e-3), (256, 9e-3))
    prompt_token_seconds: float = 4e-5
    context_token_seconds: float = 3e-8
    prompt_pair_seconds: float = 2e-9
    request_seconds: float = 2e-3
    max_tokens: int = 8192
    max_rows: int = 256
    kv_tokens: int = 400_000
    handover_seconds: float = 0.01
    handover_token_seconds: float = 3e-6

    def step(self, prompt_tokens: int, rows: int, context: int, pairs: float = 0.0) -> float:
        """Returns the seconds of a step. context: tokens that all rows attend to. pairs: of prompt
        tokens and those that they attend to."""
        return (
            self.rows_seconds(rows)
            + self.prompt_token_seconds * prompt_tokens
            + self.context_token_seconds * context
            + self.prompt_pair_seconds * pairs
        )

    def rows_seconds(self, rows: int) -> float:
        """Returns the seconds of a step in which so many rows generate, but for what they attend
        to."""
        known = self.step_seconds
        place = min(bisect_right(known, (rows, float("inf"))), len(known) - 1)
        (low, begin), (high, end) = known[max(place - 1, 0)], known[place]
        if high == low or rows <= low:
            return begin
        return max(begin, begin + (end - begin) / (high - low) * (rows - low))


def pairs_of(begin: int, tokens: int) -> float:
    """Returns the pairs of `tokens` tokens of a prompt and those that they attend to, where `begin`
    stand before them."""
    return tokens * (begin + tokens / 2)


def read_engine(path: Path) -> EngineModel:
    """Reads a model's JSON.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong.
    """
    try:
        model = msgspec.json.decode(read_bounded(path), type=EngineModel)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"engine: {error}", "engine") from None
    for name in EngineModel.__struct_fields__:
        value = getattr(model, name)
        if name == "step_seconds":
            _check_steps(value)
        elif value < 0 or (value == 0 and name in ("max_tokens", "max_rows")):
            raise ConfigError(f"engine: {name} must be positive, got {value}", "engine")
    return model


def _check_steps(steps: tuple[tuple[int, float], ...]) -> None:
    rows = [count for count, _ in steps]
    if not rows or rows[0] < 1 or any(a >= b for a, b in itertools.pairwise(rows)):
        raise ConfigError(
            f"engine: step_seconds needs growing numbers of rows, got {rows}", "engine"
        )
    if any(seconds <= 0 for _, seconds in steps):
        raise ConfigError("engine: seconds of a step must be positive", "engine")
