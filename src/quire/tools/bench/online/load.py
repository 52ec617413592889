"""The requests of a load test, and the times at which they are sent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.errors import ConfigError
from quire.system import MOST_DATA, read_bounded
from quire.tools.workload import WorkloadTrace

Endpoint = Literal["completions", "chat"]

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, and the number of output tokens to ask for."""

    prompt: Prompt
    output_len: int


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of random prompts, in tokens.

    Lengths are drawn from [n (1 - spread), n (1 + spread)]. The first `prefix_len` tokens of all
    prompts are the same, and not counted in `input_len`.
    """

    input_len: int = 512
    output_len: int = 256
    spread: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.spread < 1.0:
            raise ConfigError(f"spread must be in [0, 1), got {self.spread}", "spread")


def random_asks(count: int, lengths: Lengths, top: int, seed: int) -> list[Ask]:
    """Returns prompts of random ids from [10, top)."""
    draw = random.Random(seed)
    prefix = [draw.randrange(10, top) for _ in range(lengths.prefix_len)]

    def length(mean: int) -> int:
        low, high = mean * (1 - lengths.spread), mean * (1 + lengths.spread)
        return max(1, draw.randint(round(low), round(high)))

    asks = []
    for _ in range(count):
        size = length(lengths.input_len)
        prompt = prefix + [draw.randrange(10, top) for _ in range(size)]
        asks.append(Ask(prompt, length(lengths.output_len)))
    return asks


def trace_asks(trace: WorkloadTrace, top: int, seed: int) -> list[Ask]:
    """Returns the requests of a trace, with prompts of random ids from [10, top).

    Equal blocks of the trace have equal ids. Another seed gives other ids, so that a server's cache
    knows none of them.
    """
    draw = np.random.default_rng(seed % 2**63)
    blocks: dict[int, list[int]] = {}
    asks = []
    for request in trace.requests:
        prompt: list[int] = []
        for block in request.blocks:
            if block not in blocks:
                blocks[block] = draw.integers(10, top, trace.block_size).tolist()
            prompt += blocks[block]
        prompt += draw.integers(10, top, max(0, request.prompt - len(prompt))).tolist()
        asks.append(Ask(prompt[: request.prompt], request.output))
    return asks


def file_asks(path: Path, count: int, output_len: int | None, seed: int) -> list[Ask]:
    """Draws requests from a file, without repetition if it has enough.

    The file has JSON lines of {"prompt", "output_len"?}. In ShareGPT's format it is a JSON array of
    {"conversations": [{"value"}, ...]}, in which the first two turns are prompt and answer.

    Raises:
        ConfigError: the file is invalid. The error names the part.
    """
    try:
        text = read_bounded(path, MOST_DATA).decode()
        shared = text.lstrip().startswith("[")
        entries = json.loads(text) if shared else [json.loads(x) for x in text.splitlines() if x]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"dataset {path}: {error}", "dataset") from None
    found = [_from_entry(entry, output_len) for entry in entries]
    asks = [ask for ask in found if ask is not None]
    if not asks:
        raise ConfigError(f"dataset {path}: no entry has a prompt and an output length", "dataset")
    draw = random.Random(seed)
    draw.shuffle(asks)
    return [asks[i % len(asks)] for i in range(count)]


_WORD = 4
"""Characters per token, for entries that have only the text of an answer."""


def _from_entry(entry: Any, output_len: int | None) -> Ask | None:
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations")
    if isinstance(turns, list):
        if len(turns) < 2:
            return None
        answer = str(turns[1].get("value", ""))
        return Ask(str(turns[0].get("value", "")), output_len or max(1, len(answer) // _WORD))
    prompt, length = entry.get("prompt"), output_len or entry.get("output_len")
    if not isinstance(prompt, (str, list)) or not isinstance(length, int):
        return None
    return Ask(prompt, length)


def as_text(asks: Sequence[Ask], detokenize: Callable[[list[int]], str]) -> list[Ask]:
    """Returns the requests with prompts as text instead of ids."""
    return [
        ask if isinstance(ask.prompt, str) else Ask(detokenize(ask.prompt), ask.output_len)
        for ask in asks
    ]


def body(ask: Ask, model: str, endpoint: Endpoint, sampling: dict[str, Any]) -> bytes:
    """Returns a streaming request as JSON.

    Args:
        sampling: more fields of the request.
    """
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }
    if endpoint == "completions":
        fields["prompt"] = ask.prompt
    elif isinstance(ask.prompt, str):
        fields["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        raise ConfigError("chat requests need prompts as text", "prompts")
    return json.dumps(fields).encode()


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns the seconds from the start at which requests are sent.

    The gaps between them have a gamma distribution with mean 1 / rate and shape `burstiness`. A
    burstiness of 1 is a Poisson process. Below 1 requests come in bursts, above 1 more evenly.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    return (np.cumsum(gaps) - gaps[0]).tolist()  # type: ignore[no-any-return]
