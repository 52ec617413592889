"""Benchmark cases: named ones, and free ones as ROWSxINxOUT.

- `nano` is the community's benchmark of small engines, and `nano-penalized` is the same with
  penalties.
- `b64` is a steady batch, and `b1` is one stream.
- `ttft` is one token after a fresh prompt.

This file imports no engine, so that adapters can give the same work to other engines.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.errors import ConfigError

TTFT_LENGTHS = (512, 2048, 8192)
_IDS = 10_000
_FREE = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})")
_PENALIZED = {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are made at once.

    End-of-sequence tokens are ignored, and outputs are not detokenized.

    Attributes:
        prompts: token ids of each prompt.
        lengths: number of output tokens of each request.
        sampling: keywords of `SamplingParams`, which are the same in Quire and in vLLM.
    """

    prompts: list[list[int]]
    lengths: list[int]
    sampling: dict[str, float]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of requests and their lengths. `ttft` is a special case with `rows` 0.

    Attributes:
        name: the case's name.
        rows: number of requests.
        input_len: prompt tokens of a request.
        output_len: output tokens of a request.
        least: if set, lengths are drawn between it and the two lengths above.
        sampling: see `Workload`.
    """

    name: str
    rows: int
    input_len: int
    output_len: int
    least: int | None = None
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})

    def positions(self, scale: float = 1.0) -> int:
        """Returns the length of the longest sequence that the case may need."""
        return scaled(self.input_len, scale) + self._output(scale)

    def workload(self, vocab_size: int, scale: float = 1.0) -> Workload:
        """Returns the requests.

        Ids are below 10000, or below the vocabulary's size if that is smaller. All random numbers
        are drawn in a fixed order, so that a case is the same work on every engine.

        Args:
            scale: factor of the number of requests and of their lengths.
        """
        top = min(_IDS, vocab_size - 1)
        draw = random.Random(0)
        rows = scaled(self.rows, scale)
        if self.least is not None:
            low = scaled(self.least, scale)
            high = scaled(self.input_len, scale)
            prompts = [
                [draw.randint(0, top) for _ in range(draw.randint(low, high))] for _ in range(rows)
            ]
            high = scaled(self.output_len, scale)
            return Workload(prompts, [draw.randint(low, high) for _ in prompts], self.sampling)
        length = scaled(self.input_len, scale)
        prompts = [random_prompt(draw, length, vocab_size) for _ in range(rows)]
        return Workload(prompts, [self._output(scale)] * rows, self.sampling)

    def lengths(self, vocab_size: int) -> tuple[list[int], list[int]]:
        """Returns the lengths of `workload`'s prompts and outputs. Draws tokens only if it must."""
        if self.least is None:
            return [self.input_len] * self.rows, [self._output(1.0)] * self.rows
        work = self.workload(vocab_size)
        return [len(prompt) for prompt in work.prompts], work.lengths

    def _output(self, scale: float) -> int:
        """Returns the scaled number of output tokens. A case with decode steps keeps at least
        one."""
        return scaled(self.output_len, scale, least=min(2, self.output_len))


TTFT = Case("ttft", 0, 0, 0)

NAMED = {
    case.name: case
    for case in (
        Case("nano", 256, 1024, 1024, 100, {"temperature": 0.6}),
        Case("nano-penalized", 256, 1024, 1024, 100, {"temperature": 0.6, **_PENALIZED}),
        Case("nano-logprobs", 256, 1024, 1024, 100, {"temperature": 0.6, "logprobs": 5}),
        Case("b64", 64, 512, 256),
        Case("b1", 1, 128, 512),
        Case("b1-256", 1, 128, 256),
        TTFT,
    )
}


def parse_case(name: str) -> Case:
    """Returns the case for a name or for ROWSxINxOUT. Raises ConfigError for any other text."""
    if name in NAMED:
        return NAMED[name]
    free = _FREE.fullmatch(name)
    if free is None:
        raise ConfigError(
            f"unknown case {name!r}; expected one of: {', '.join(NAMED)}, or ROWSxINxOUT",
            "case",
        )
    rows, input_len, output_len = map(int, free.groups())
    return Case(name, rows, input_len, output_len)


def parse_numbers(text: str, name: str) -> list[int]:
    """Parses numbers from 1 on, such as "1,2,4". Raises ConfigError, which names the option."""
    numbers = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdigit() or int(part) < 1:
            raise ConfigError(f"{name} takes numbers from 1 on, as in 1,2,4; got {text!r}", name)
        numbers.append(int(part))
    return numbers


def check_scale(scale: float) -> None:
    if not 0.0 < scale <= 1.0:
        raise ConfigError(f"scale must be in (0, 1], got {scale}", "scale")


def check_lengths(cases: Sequence[Case], max_model_len: int, scale: float = 1.0) -> None:
    """Raises ConfigError for a case with sequences longer than the model's."""
    for case in cases:
        if case.positions(scale) > max_model_len and case is not TTFT:
            raise ConfigError(
                f"case {case.name} needs sequences of {case.positions(scale)} tokens, but "
                f"max_model_len is {max_model_len}",
                "case",
            )


def scaled(value: int, scale: float, least: int = 1) -> int:
    return max(least, round(value * scale))


def random_prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    """Returns a random prompt. Its ids begin at 10, because lower ids are often special tokens."""
    top = min(_IDS, vocab_size - 1)
    return [draw.randint(min(10, top), top) for _ in range(length)]
