"""From answers to figures, as `vllm bench serve` defines them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from quire.bench.online.client import Answer, Times
from quire.errors import ConfigError

KINDS = ("ttft", "tpot", "itl", "e2el")
"""Time to the first token; per further token, a mean over each request's; between two events of a
stream; and to the end of the answer."""


def parse_goodput(asked: Sequence[str]) -> dict[str, float]:
    """ "ttft:200" as {"ttft": 200.0}, in milliseconds. Raises ConfigError."""
    limits = {}
    for each in asked:
        kind, _, value = each.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if kind not in ("ttft", "tpot", "e2el") or not limit > 0.0:
            raise ConfigError(
                f"goodput takes ttft, tpot or e2el and milliseconds, as in ttft:200; got {each!r}",
                "goodput",
            )
        limits[kind] = limit
    return limits


def summary(
    answers: Sequence[Answer],
    *,
    percentiles: Sequence[float] = (50, 95, 99),
    goodput: dict[str, float] | None = None,
) -> dict[str, float]:
    """Throughput over the time from the first request sent to the last answer, and milliseconds.

    Requests that failed are counted, and left out of all else.
    """
    good = [answer for answer in answers if not answer.error and len(answer.times)]
    metrics: dict[str, float] = {"requests": len(good), "failed": len(answers) - len(good)}
    if not good:
        return metrics
    seconds = max(a.ended for a in good) - min(a.sent for a in answers)
    output = sum(answer.output_tokens for answer in good)
    prompt = sum(answer.prompt_tokens for answer in good)
    metrics |= {
        "seconds": seconds,
        "request_s": len(good) / seconds,
        "output_tok_s": output / seconds,
        "total_tok_s": (output + prompt) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
    }
    times = {kind: _times(kind, good) for kind in KINDS}
    for kind, values in times.items():
        if len(values):
            metrics[f"{kind}_mean_ms"] = float(values.mean())
            for p in percentiles:
                metrics[f"{kind}_p{p:g}_ms"] = float(np.percentile(values, p))
    if goodput:
        within = np.ones(len(good), dtype=bool)
        for kind, limit in goodput.items():
            each = np.array([_of(kind, answer) for answer in good])
            within &= ~(each > limit)
        metrics["goodput_s"] = float(within.sum()) / seconds
    return metrics


def _of(kind: str, answer: Answer) -> float:
    """One request's, in milliseconds; nan where it has none."""
    first, last = answer.times[0], answer.times[-1]
    if kind == "ttft":
        return float(first - answer.sent) * 1e3
    if kind == "e2el":
        return (answer.ended - answer.sent) * 1e3
    more = answer.output_tokens - 1
    return float(last - first) / more * 1e3 if more > 0 else float("nan")


def _times(kind: str, answers: Sequence[Answer]) -> Times:
    if kind == "itl":
        return np.concatenate([np.diff(answer.times) for answer in answers]) * 1e3
    values: Times = np.array([_of(kind, answer) for answer in answers])
    return values[~np.isnan(values)]


def failures(answers: Sequence[Answer], most: int = 5) -> list[str]:
    """Returns the errors with their counts, the most frequent first."""
    found = Counter(a.error or "no token came" for a in answers if a.error or not len(a.times))
    return [f"{count} x {error}" for error, count in found.most_common(most)]
