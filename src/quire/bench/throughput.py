"""The engine through its public door: `LLM.generate` on random token ids.

`nano` is the community's benchmark of small engines; `b64` a steady batch; `b1` one stream;
`ttft` one token after a fresh prompt. Output tokens count, prompt tokens do not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

CASES = ("nano", "b64", "b1", "ttft")
TTFT_LENGTHS = (512, 2048, 8192)
_TTFT_RUNS = 12

Workload = tuple[list[list[int]], list[int], float]
"""Prompts, output lengths, temperature."""


def check_cases(cases: list[str], scale: float) -> None:
    for case in cases:
        if case not in CASES:
            raise ConfigError(f"unknown case {case!r}; known are {', '.join(CASES)}", "case")
    if not 0.0 < scale <= 1.0:
        raise ConfigError(f"scale must be in (0, 1], got {scale}", "scale")


def workload(case: str, vocab_size: int, scale: float = 1.0) -> Workload:
    """The requests of `nano`, `b64` or `b1`. `scale` shrinks their number and lengths.

    Ids go up to 10000 where the vocabulary does, and all random numbers are drawn in a fixed
    order, so that the same case is the same work on every engine.
    """
    top = min(10000, vocab_size - 1)
    draw = random.Random(0)

    def scaled(value: int, least: int = 1) -> int:
        return max(least, round(value * scale))

    if case == "nano":
        low, high = scaled(100), scaled(1024)
        prompts = [
            [draw.randint(0, top) for _ in range(draw.randint(low, high))]
            for _ in range(scaled(256))
        ]
        return prompts, [draw.randint(low, high) for _ in prompts], 0.6
    requests, prompt_len, output_len = (64, 512, 256) if case == "b64" else (1, 128, 512)
    count = 1 if case == "b1" else scaled(requests)
    prompts = [
        [draw.randint(min(10, top), top) for _ in range(scaled(prompt_len))] for _ in range(count)
    ]
    return prompts, [scaled(output_len, 2)] * count, 0.0


def measure(llm: LLM, case: str, *, vocab_size: int, scale: float, repeat: int) -> dict[str, float]:
    """Metrics of one throughput case, best of `repeat` after a warm-up."""
    prompts, lengths, temperature = workload(case, vocab_size, scale)
    params = [_params(length, temperature) for length in lengths]
    _generate(llm, prompts[:4], [_params(8, temperature)] * len(prompts[:4]))
    seconds = min(_timed(lambda: _generate(llm, prompts, params)) for _ in range(repeat))
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(lengths),
        "seconds": seconds,
        "output_tok_s": sum(lengths) / seconds,
    }


def measure_ttft(
    llm: LLM, *, vocab_size: int, max_model_len: int, scale: float
) -> dict[str, float]:
    """Milliseconds to one token after a prompt of fresh random ids, best of 12 per length; lengths
    beyond the context are left out."""
    top, draw, metrics = min(10000, vocab_size - 1), random.Random(0), {}
    for length in TTFT_LENGTHS:
        tokens = max(1, round(length * scale))
        if tokens >= max_model_len:
            continue
        best = float("inf")
        for _ in range(_TTFT_RUNS):
            prompt = [draw.randint(min(10, top), top) for _ in range(tokens)]
            best = min(best, _timed(lambda p=prompt: _generate(llm, [p], [_params(1, 0.0)])))  # type: ignore[misc]
        metrics[f"ttft_{tokens}_ms"] = best * 1e3
    return metrics


def _params(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, ignore_eos=True, detokenize=False
    )


def _generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
