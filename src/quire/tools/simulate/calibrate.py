"""Measures an `EngineModel` on a server, with prompts of several lengths and with several
streams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.tools.bench.online.client import Answer
from quire.tools.bench.online.drive import Server, drive
from quire.tools.bench.online.load import Ask, body
from quire.tools.simulate.engine_model import EngineModel, pairs_of

Float64 = np.ndarray[Any, np.dtype[np.float64]]

_LENGTHS = (1.0, 0.5, 0.25, 0.125)
"""Lengths of prompts, as fractions of the longest."""
_HELD = (0.25, 0.0625)
"""Lengths of cached beginnings of prompts, as fractions of the longest prompt."""
_RESTS = (32, 128)
"""Numbers of prompt tokens after a cached beginning. Small steps take more time per token."""
_LONGEST = 4096
_REPEATS = 5
_STREAMS = (1, 2, 3, 4, 6, 8, 16, 64)
_OUTPUT = 48
_SHORT = 16


class _SchedulerInfo(msgspec.Struct):
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class _EngineInfo(msgspec.Struct):
    scheduler: _SchedulerInfo


class _ServerInfo(msgspec.Struct):
    engine: _EngineInfo


class _ServerLoad(msgspec.Struct):
    kv_tokens: int


class StepSample(msgspec.Struct, frozen=True):
    """The time of a step without prompts.

    Attributes:
        rows: number of rows.
        context: number of tokens to which all rows attend.
        seconds: time of the step.
    """

    rows: int
    context: int
    seconds: float


class PromptSample(msgspec.Struct, frozen=True):
    """The time to the first token of a prompt without other requests.

    Attributes:
        tokens: number of prompt tokens.
        seconds: time to the first token.
        held: number of prompt tokens that the cache has.
    """

    tokens: int
    seconds: float
    held: int = 0


def fit(
    steps: Sequence[StepSample], prompts: Sequence[PromptSample], limits: EngineModel
) -> EngineModel:
    """Fits the coefficients of time by least squares. No coefficient is negative.

    Args:
        limits: a model with the other fields.
    """
    # Steps of two or three rows can take longer than steps of more rows, so a line does not fit.
    counts = sorted({step.rows for step in steps})
    rows = np.array(
        [[*(float(step.rows == count) for count in counts), step.context] for step in steps]
    )
    times = np.array([step.seconds for step in steps])
    *of_rows, context = _least_squares(rows, times, times)
    measured = zip(counts, (max(seconds, 1e-6) for seconds in of_rows), strict=True)
    model = msgspec.structs.replace(limits, step_seconds=tuple(measured))
    # A long prompt takes several steps.
    rests = [each.tokens - each.held for each in prompts]
    parts = np.array([-(-rest // limits.max_tokens) for rest in rests])
    lengths = np.array(
        [[1.0, rest, pairs_of(each.held, rest)] for each, rest in zip(prompts, rests, strict=True)]
    )
    times = np.array([prompt.seconds for prompt in prompts])
    start, token, pair = _least_squares(lengths, times - model.rows_seconds(0) * parts, times)
    return msgspec.structs.replace(
        model,
        context_token_seconds=context,
        prompt_token_seconds=token,
        prompt_pair_seconds=pair,
        request_seconds=start,
    )


def _least_squares(columns: Float64, values: Float64, whole: Float64) -> list[float]:
    """Returns the coefficients with the least errors relative to `whole`.

    Coefficients that would be negative are set to 0, beginning with the last one."""
    weighted, wanted = columns / whole[:, None], values / whole
    used = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, used], wanted, rcond=None)
        negative = [place for place, value in zip(used, found, strict=True) if value < 0.0]
        if not negative:
            break
        used.remove(negative[-1])
    values_of = dict(zip(used, found.tolist(), strict=True))
    return [float(values_of.get(place, 0.0)) for place in range(columns.shape[1])]


def calibrate(url: str, *, key: str | None, model: str | None) -> EngineModel:
    """Measures a server. The server must have no other requests.

    Raises:
        ConfigError: the server does not answer, or the key is not an admin's.
    """
    server = Server(url, key)
    name = model or server.model()
    info = server.call("/server_info", _ServerInfo).engine.scheduler
    limits = EngineModel(
        max_tokens=info.max_num_batched_tokens,
        max_rows=info.max_num_seqs,
        kv_tokens=server.call("/load", _ServerLoad).kv_tokens,
    )
    top, draw = server.top(name), random.Random(0)

    def tokens_of(length: int) -> list[int]:
        return [draw.randrange(top) for _ in range(length)]

    def ask(
        prompts: Sequence[int], output: int, streams: int, held: Sequence[int] = ()
    ) -> list[Answer]:
        asks = [Ask([*held, *tokens_of(length - len(held))], output) for length in prompts]
        sampling = {"temperature": 0.0, "ignore_eos": True}
        bodies = [body(each, name, "completions", sampling) for each in asks]
        target = f"{server.base_url}/v1/completions"
        answers, _ = drive(target, server.headers, bodies, concurrency=streams, processes=1)
        failed = next((answer.error for answer in answers if answer.error), None)
        if failed is not None:
            raise ConfigError(f"a request failed: {failed}", "calibrate")
        return answers

    longest = min(_LONGEST, info.max_model_len - _OUTPUT - 1)
    ask([_SHORT] * 4, _OUTPUT, 2)  # A warm-up, because the first requests are slow.
    lengths = [int(longest * share) for share in _LENGTHS]
    prompts = [
        PromptSample(length, float(np.median([a.times[0] - a.sent for a in answers])))
        for length in lengths
        # Two tokens, because an engine may report the first when it launches the next step.
        for answers in (ask([length] * _REPEATS, 2, 1),)
    ]
    for share in _HELD:
        held = tokens_of(int(longest * share))
        ask([len(held) + 1], 2, 1, held)
        for rest in _RESTS:
            answers = ask([len(held) + rest] * _REPEATS, 2, 1, held)
            seconds = float(np.median([a.times[0] - a.sent for a in answers]))
            cached = min(answer.cached_tokens for answer in answers)
            prompts.append(PromptSample(len(held) + rest, seconds, cached))
    steps = [
        StepSample(streams, streams * (length + _OUTPUT // 2), _between(answers))
        for length in (_SHORT, longest // 2)
        for streams in _STREAMS
        if streams <= limits.max_rows and streams * (length + _OUTPUT) <= limits.kv_tokens
        for answers in (ask([length] * streams, _OUTPUT, streams),)
    ]
    return fit(steps, prompts, limits)


def _between(answers: Sequence[Answer]) -> float:
    """Returns the median seconds between two tokens while all requests generate."""
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    gaps = [
        float(gap)
        for answer in answers
        for now, gap in zip(answer.times[1:], np.diff(answer.times), strict=True)
        if begin < now <= end
    ]
    if not gaps:
        gaps = [float(gap) for answer in answers for gap in np.diff(answer.times)]
    return float(np.median(gaps))


def encode(model: EngineModel) -> bytes:
    """Returns a model's JSON."""
    return msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n"
