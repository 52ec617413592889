"""Traces of requests: when they came, how long they were, and which blocks their prompts share.

`read_trace` reads published formats:

- Mooncake's (Qin et al., 2024) and Qwen's (Wang et al., 2025) have one JSON object per line, with
  `timestamp`, `input_length`, `output_length` and `hash_ids`. Equal ids stand for equal blocks
  after equal prefixes. Mooncake's has milliseconds and blocks of 512 tokens; Qwen's has seconds,
  blocks of 16 tokens, and `chat_id`.
- Azure's (Patel et al., 2024) and BurstGPT's (Wang et al., 2024) are CSV files with a header. They
  have lengths only, so their prompts share nothing.

`chat_trace` makes a trace of conversations.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
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

    @property
    def rate(self) -> float:
        """Mean number of requests per second."""
        return len(self.requests) / max(self.requests[-1].at, 1e-9)


def read_trace(path: Path, *, speed: float = 1.0, most: int | None = None) -> WorkloadTrace:
    """Reads a trace.

    Args:
        path: the file.
        speed: factor by which requests arrive faster than in the trace.
        most: number of requests to read; None reads all.

    Raises:
        ConfigError: the file cannot be read, or a line does not describe a request.
    """
    lines: list[_Line] = []
    try:
        with open_regular(path) as file:
            lines_read = iter(functools.partial(file.readline, _MOST_LINE), b"")
            for line in _lines(lines_read):
                if len(lines) == most:
                    break
                lines.append(line)
    except OSError as error:
        raise ConfigError(f"trace: {error}", "trace") from None
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


def _lines(texts: Iterator[bytes]) -> Iterator[_Line]:
    """Yields the requests of a file's lines, whose format the first line shows."""
    decoder = msgspec.json.Decoder(_Line)
    columns: _Columns | None = None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        if number == 1 and not text.lstrip().startswith(b"{"):
            columns = _columns(_cells(text, number))
            continue
        try:
            line = decoder.decode(text) if columns is None else columns.line(_cells(text, number))
        except (msgspec.DecodeError, ValueError, OverflowError, IndexError) as error:
            raise ConfigError(f"trace: line {number}: {error}", "trace") from None
        _check(line, number)
        yield line


def _cells(text: bytes, number: int) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text.decode("utf-8-sig"))), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace: line {number}: {error}", "trace") from None


_CSV_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
"""Azure's and BurstGPT's names for the time, the prompt's tokens and the answer's tokens."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Numbers of the columns of a CSV file."""

    at: int
    prompt: int
    output: int

    def line(self, cells: list[str]) -> _Line:
        """Returns the request of a row. A failed one, whose answer is empty, has one token."""
        output = max(1, int(float(cells[self.output])))
        return _Line(_milliseconds(cells[self.at]), int(float(cells[self.prompt])), output, [])


def _columns(names: list[str]) -> _Columns:
    for columns in _CSV_COLUMNS:
        if set(columns) <= set(names):
            return _Columns(*(names.index(name) for name in columns))
    known = "; ".join(", ".join(columns) for columns in _CSV_COLUMNS)
    raise ConfigError(
        f"trace: line 1: neither a JSON object nor a CSV header with one of: {known}", "trace"
    )


def _milliseconds(text: str) -> float:
    """Returns a time as milliseconds: a number of seconds, or a date with a time."""
    try:
        return 1e3 * float(text)
    except ValueError:
        # Azure's fractions of a second have seven digits, and Python 3.11 reads at most six.
        whole, _, fraction = text.strip().partition(".")
        digits = fraction.partition("+")[0][:6]
        moment = datetime.fromisoformat(f"{whole}+00:00")
        return 1e3 * moment.timestamp() + float(f"0.{digits or 0}") * 1e3


def _check(line: _Line, number: int) -> None:
    if not math.isfinite(line.timestamp):
        raise ConfigError(f"trace: line {number}: no time: {line.timestamp}", "trace")
    if not all(1 <= length < _MOST_TOKENS for length in (line.input_length, line.output_length)):
        raise ConfigError(f"trace: line {number}: lengths must be in [1, {_MOST_TOKENS})", "trace")


_SYSTEM_TOKENS = 512
_TURNS = 6
_THINK_SECONDS = 12.0
_CHAT_RATE = 1.0


def chat_trace(requests: int, seed: int = 0) -> WorkloadTrace:
    """Returns a trace of conversations that begin at random, about one per second.

    All share a system prompt of 512 tokens. A conversation has one to six turns. Each prompt
    repeats the conversation so far, with answers, and adds a question. Questions have a median of
    60 tokens and answers one of 160. Both are log-normal, and so is the time that a user thinks.

    Args:
        requests: number of requests.
    """
    draw = random.Random(seed)
    fresh = iter(range(1 << 40, 1 << 41))
    system = [next(fresh) for _ in range(_SYSTEM_TOKENS // QWEN_BLOCK)]
    found: list[TraceRequest] = []
    begin = 0.0
    # The last conversations are cut off where the first `requests` end, so some are made in excess.
    while len(found) < 2 * requests:
        begin += draw.expovariate(_CHAT_RATE)
        at, tokens, blocks = begin, _SYSTEM_TOKENS, list(system)
        for _ in range(draw.randint(1, _TURNS)):
            tokens += _length(draw, 60)
            blocks += [next(fresh) for _ in range(tokens // QWEN_BLOCK - len(blocks))]
            output = _length(draw, 160)
            found.append(TraceRequest(at, tokens, output, tuple(blocks)))
            tokens += output
            at += _THINK_SECONDS * draw.lognormvariate(0.0, 0.5)
    found.sort(key=lambda request: request.at)
    first = found[0].at
    return WorkloadTrace(
        [replace(request, at=request.at - first) for request in found[:requests]], QWEN_BLOCK
    )


def _length(draw: random.Random, median: int) -> int:
    return max(8, min(8 * median, round(median * draw.lognormvariate(0.0, 0.8))))
