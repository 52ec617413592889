"""The model of an engine: the time of a step, and the limits of steps and of the cache."""

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
            are interpolated. Values beyond the last pair are extrapolated. A step without
            generating rows takes as long as a step with one row.
        prompt_token_seconds: time per prompt token.
        context_token_seconds: time per token to which a generating row attends.
        prompt_pair_seconds: time per pair of a prompt token and a token to which it attends.
        request_seconds: a request's time outside of steps, for tokenizing and HTTP.
        max_tokens: the most tokens of a step.
        max_rows: the most rows of a step.
        kv_tokens: number of tokens that fit into the KV cache.
        handover_seconds: time per prompt that another replica computed.
        handover_token_seconds: time per token of such a prompt.
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
        """Returns the seconds of a step.

        Args:
            prompt_tokens: number of prompt tokens.
            rows: number of generating rows.
            context: number of tokens to which all generating rows attend.
            pairs: number of pairs of a prompt token and a token to which it attends.
        """
        return (
            self.rows_seconds(rows)
            + self.prompt_token_seconds * prompt_tokens
            + self.context_token_seconds * context
            + self.prompt_pair_seconds * pairs
        )

    def rows_seconds(self, rows: int) -> float:
        """Returns the seconds of a step with this number of generating rows, without attention."""
        known = self.step_seconds
        place = min(bisect_right(known, (rows, float("inf"))), len(known) - 1)
        (low, begin), (high, end) = known[max(place - 1, 0)], known[place]
        if high == low or rows <= low:
            return begin
        return max(begin, begin + (end - begin) / (high - low) * (rows - low))


def pairs_of(begin: int, tokens: int) -> float:
    """Returns the number of pairs of a prompt token and a token to which it attends.

    Args:
        begin: number of tokens before the prompt tokens.
        tokens: number of prompt tokens.
    """
    return tokens * (begin + tokens / 2)


def read_engine(path: Path) -> EngineModel:
    """Reads a model's JSON.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid.
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
