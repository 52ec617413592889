"""Benchmark cases: named ones, and free ones as ROWSxINxOUT.

`nano` is the community's benchmark of small engines; `nano-penalized` the same with penalties;
`b64` a steady batch; `b1` one stream; `ttft` one token after a fresh prompt. No engine is imported
here, so that an adapter can give the same work to another one.
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
    """Requests to be made at once.

    sampling: keywords of `SamplingParams`, the same in Quire and in vLLM. End-of-sequence tokens
    are ignored and no text is made.
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
    """`rows` requests of `input_len` prompt and `output_len` output tokens; where `least` is set,
    lengths are drawn between it and those. `ttft` is no case of this kind (`rows` is 0)."""

    name: str
    rows: int
    input_len: int
    output_len: int
    least: int | None = None
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})

    def positions(self, scale: float = 1.0) -> int:
        """The longest sequence that it may need."""
        return scaled(self.input_len, scale) + self._output(scale)

    def workload(self, vocab_size: int, scale: float = 1.0) -> Workload:
        """The requests. `scale` shrinks their number and lengths.

        Ids go up to 10000 where the vocabulary does, and all random numbers are drawn in a fixed
        order, so that the same case is the same work on every engine.
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
        """Returns the tokens of `workload`'s prompts and outputs, mostly without drawing any."""
        if self.least is None:
            return [self.input_len] * self.rows, [self._output(1.0)] * self.rows
        work = self.workload(vocab_size)
        return [len(prompt) for prompt in work.prompts], work.lengths

    def _output(self, scale: float) -> int:
        """A case that decodes still does so when it is scaled down."""
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
    """A named case, or ROWSxINxOUT. Raises ConfigError."""
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
    """ "1,2,4" as numbers from 1 on. Raises ConfigError naming the option."""
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
    """Lowest id of random prompts, as lower ids are often special tokens."""
    top = min(_IDS, vocab_size - 1)
    return [draw.randint(min(10, top), top) for _ in range(length)]
