"""Traces of requests: when they came, how long they were, and which blocks their prompts share.

It reads two published formats with one JSON object per line. Mooncake's (Qin et al., 2024) has
`timestamp` in ms and blocks of 512 tokens. Qwen's (Wang et al., 2025) has `timestamp` in s, blocks
of 16 tokens, and `chat_id`. Both have `input_length`, `output_length` and `hash_ids`. Equal ids
stand for equal blocks after equal prefixes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.system import open_regular

MOONCAKE_BLOCK = 512
QWEN_BLOCK = 16
_MOST_LINE = 16 << 20
"""Limit for the bytes of a line."""
_MOST_TOKENS = 1 << 31
"""Limit for the tokens of a prompt or an answer, because a long prompt takes many simulated
steps."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    chat_id: int | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        at: arrival, in seconds from the trace's start.
        prompt: number of prompt tokens.
        output: number of output tokens.
        blocks: ids of the prompt's whole blocks.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkloadTrace:
    """A trace.

    Attributes:
        requests: requests in order of arrival.
        block_size: tokens of a block.
    """

    requests: list[TraceRequest]
    block_size: int


def read_trace(path: Path, *, speed: float = 1.0, most: int | None = None) -> WorkloadTrace:
    """Reads a trace.

    Args:
        path: the file.
        speed: factor by which requests arrive faster than in the trace.
        most: number of requests to read; None reads all.

    Raises:
        ConfigError: the file cannot be read, or a line does not describe a request.
    """
    decoder = msgspec.json.Decoder(_Line)
    lines: list[_Line] = []
    try:
        with open_regular(path) as file:
            lines_read = iter(functools.partial(file.readline, _MOST_LINE), b"")
            for number, text in enumerate(lines_read, 1):
                if len(lines) == most:
                    break
                if text.strip():
                    lines.append(decoder.decode(text))
                    _check(lines[-1], number)
    except OSError as error:
        raise ConfigError(f"trace: {error}", "trace") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"trace: line {number}: {error}", "trace") from None
    if not lines:
        raise ConfigError("trace: the file has no requests", "trace")
    qwen = lines[0].chat_id is not None
    size, second = (QWEN_BLOCK, 1.0) if qwen else (MOONCAKE_BLOCK, 1e3)
    lines.sort(key=lambda line: line.timestamp)
    begin = lines[0].timestamp
    requests = [
        TraceRequest(
            (line.timestamp - begin) / second / speed,
            line.input_length,
            line.output_length,
            tuple(line.hash_ids[: line.input_length // size]),
        )
        for line in lines
    ]
    return WorkloadTrace(requests, size)


def _check(line: _Line, number: int) -> None:
    if not all(1 <= length < _MOST_TOKENS for length in (line.input_length, line.output_length)):
        raise ConfigError(f"trace: line {number}: lengths must be in [1, {_MOST_TOKENS})", "trace")
