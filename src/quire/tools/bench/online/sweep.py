"""Computes metrics from answers, as `vllm bench serve` defines them, and runs sweeps of loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.errors import ConfigError
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.online import load
from quire.tools.bench.online.client import Answer, Times
from quire.tools.bench.online.drive import BUSY, Server, drive, processes_for

KINDS = ("ttft", "tpot", "itl", "e2el")
"""Kinds of times: to the first token, per further token (each request's mean), between two events
of a stream, and to the end of the answer."""


def parse_goodput(asked: Sequence[str]) -> dict[str, float]:
    """Parses limits in milliseconds: "ttft:200" becomes {"ttft": 200.0}. Raises ConfigError."""
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
    """Returns throughput from the first request to the last answer, and times in milliseconds.

    Failed requests are counted, but left out of all other metrics.
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
            each = np.array([_request_time(kind, answer) for answer in good])
            within &= ~(each > limit)
        metrics["goodput_s"] = float(within.sum()) / seconds
    return metrics


def _request_time(kind: str, answer: Answer) -> float:
    """Returns one request's time of a kind, in milliseconds, or nan if it has none."""
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
    values: Times = np.array([_request_time(kind, answer) for answer in answers])
    return values[~np.isnan(values)]


def failures(answers: Sequence[Answer], most: int = 5) -> list[str]:
    """Returns the errors with their counts, the most frequent first."""
    found = Counter(a.error or "no token came" for a in answers if a.error or not len(a.times))
    return [f"{count} x {error}" for error, count in found.most_common(most)]


# A load at one or several levels of concurrency, as records.

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The load to send. See `quire bench serve --help`.

    Attributes:
        rate: requests a second; None is as fast as concurrency allows.
        count: requests at each level; None is four times the concurrency.
        dataset: a file; None makes random prompts.
    """

    endpoint: load.Endpoint = "completions"
    prompts: Literal["text", "ids"] = "text"
    lengths: load.Lengths = field(default_factory=load.Lengths)
    dataset: Path | None = None
    dataset_output_len: int | None = None
    count: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    sampling: dict[str, Any] = field(default_factory=dict)
    warmup: int = 4
    processes: int | None = None
    percentiles: Sequence[float] = (50, 95, 99)
    goodput: dict[str, float] = field(default_factory=dict)
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("endpoint", tuple(_PATHS)), ("prompts", ("text", "ids"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}", name)
        if self.endpoint == "chat" and self.prompts == "ids":
            raise ConfigError("chat requests need prompts as text", "prompts")

    def asks(self, count: int, seed: int, server: Server, model: str) -> list[load.Ask]:
        if self.dataset is not None:
            return load.file_asks(self.dataset, count, self.dataset_output_len, seed)
        asks = load.random_asks(count, self.lengths, server.top(model), seed)
        if self.prompts == "text":
            asks = load.as_text(asks, lambda tokens: server.detokenize(model, tokens))
        return asks


@dataclass(frozen=True)
class LoadLevel:
    """A measurement. metrics: see `stats.summary`; client_cpu is the busiest client process's share
    of a core. problems: what failed, and what makes the figures doubtful."""

    concurrency: int
    metrics: dict[str, float]
    problems: list[str]


def levels(
    plan: Plan,
    server: Server,
    model: str,
    concurrencies: Sequence[int],
    tell: Callable[[str], None],
    meter: GpuMeter | None = None,
) -> Iterator[LoadLevel]:
    """Each level in turn, with fresh prompts, after a warm-up. A concurrency of 0 is no limit.

    meter: the meter of the server's GPUs; None: records have no GPU metrics.
    """
    meter = meter or GpuMeter()
    url = server.base_url + _PATHS[plan.endpoint]

    def bodies(count: int, seed: int) -> list[bytes]:
        asks = plan.asks(count, seed, server, model)
        return [load.body(ask, model, plan.endpoint, plan.sampling) for ask in asks]

    if plan.warmup:
        tell(f"warming up with {plan.warmup} requests ...")
        drive(
            url, server.headers, bodies(plan.warmup, plan.seed - 1),
            concurrency=0, processes=1, timeout=plan.timeout,
        )  # fmt: skip
    for number, concurrency in enumerate(concurrencies):
        count = plan.count or max(8, 4 * concurrency)
        seed = plan.seed + 1000 * number
        at = None
        if plan.rate is not None:
            at = load.arrivals(count, plan.rate, plan.burstiness, seed)
        tell(f"{count} requests, {f'{concurrency} at once' if concurrency else 'no limit'} ...")
        asked = bodies(count, seed)
        with meter.reading() as reading:
            answers, cpu = drive(
                url,
                server.headers,
                asked,
                concurrency=concurrency,
                processes=processes_for(concurrency or count, plan.processes),
                send_at=at,
                timeout=plan.timeout,
            )
        metrics = summary(answers, percentiles=plan.percentiles, goodput=plan.goodput)
        metrics |= reading.metrics(int(metrics.get("output_tokens", 0)))
        metrics["client_cpu"] = cpu
        problems = failures(answers)
        if cpu > BUSY:
            problems.append(
                f"a client process took {cpu:.0%} of a core: the client may be what was measured; "
                "give more of --client-processes"
            )
        yield LoadLevel(concurrency, metrics, problems)
