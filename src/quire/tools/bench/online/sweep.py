"""Computes metrics from answers, as `vllm bench serve` defines them, and runs sweeps of loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.errors import ConfigError
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.online import load
from quire.tools.bench.online.client import Answer, Times
from quire.tools.bench.online.drive import BUSY, Server, drive, processes_for
from quire.tools.workload import WorkloadTrace

KINDS = ("ttft", "tpot", "itl", "e2el")
"""Kinds of times: to the first token, per further token (each request's mean), between two events
of a stream, and to the end of the answer."""


def parse_goodput(asked: Sequence[str]) -> dict[str, float]:
    """Parses limits in milliseconds: "ttft:200" becomes {"ttft": 200.0}. Raises ConfigError."""
    return _parse_limits(asked, ("ttft", "tpot", "e2el"), "goodput")


def _parse_limits(asked: Sequence[str], kinds: Sequence[str], param: str) -> dict[str, float]:
    limits = {}
    for each in asked:
        kind, _, value = each.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if kind not in kinds or not limit > 0.0:
            allowed = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
            raise ConfigError(
                f"{param} takes {allowed} and milliseconds, as in ttft:200; got {each!r}", param
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
class SweepPlan:
    """The load to send. See `quire bench serve --help`.

    Attributes:
        trace: requests with lengths, common blocks and times; None makes random prompts.
        rate: requests a second; None is as fast as concurrency allows. A trace's times are scaled
            to this rate.
        count: requests at each level; None is four times the concurrency.
        dataset: a file; None makes random prompts.
    """

    endpoint: load.Endpoint = "completions"
    prompts: Literal["text", "ids"] = "text"
    lengths: load.Lengths = field(default_factory=load.Lengths)
    dataset: Path | None = None
    trace: WorkloadTrace | None = None
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
        top = server.top(model)
        if self.trace is not None:
            asks = load.trace_asks(
                replace(self.trace, requests=self.trace.requests[:count]), top, seed
            )
        else:
            asks = load.random_asks(count, self.lengths, top, seed)
        if self.prompts == "text":
            asks = load.as_text(asks, lambda tokens: server.detokenize(model, tokens))
        return asks

    def send_at(self, count: int, seed: int) -> list[float] | None:
        """Returns when to send each of `count` requests, in seconds from the start."""
        if self.rate is None:
            return None
        if self.trace is None:
            return load.arrivals(count, self.rate, self.burstiness, seed)
        scale = self.trace.rate / self.rate
        return [request.at * scale for request in self.trace.requests[:count]]


@dataclass(frozen=True)
class LoadLevel:
    """A measurement. metrics: see `stats.summary`; client_cpu is the busiest client process's share
    of a core. problems: what failed, and what makes the figures doubtful."""

    concurrency: int
    metrics: dict[str, float]
    problems: list[str]


def levels(
    plan: SweepPlan,
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
        at = plan.send_at(count, seed)
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


# The highest rate at which a server keeps its aims.

_GROWTH = 2.0
_MOST_LEVELS = 24


@dataclass(frozen=True)
class Aims:
    """The times that a server must keep at a rate.

    Attributes:
        limits: most milliseconds by kind of time (`KINDS`).
        percentile: the percentile of the times that must be within the limits.
    """

    limits: dict[str, float]
    percentile: float = 99.0

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile <= 100.0:
            raise ConfigError(
                f"slo_percentile must be in (0, 100], got {self.percentile:g}", "slo_percentile"
            )

    def metric(self, kind: str) -> str:
        return f"{kind}_p{self.percentile:g}_ms"

    def misses(self, metrics: dict[str, float]) -> list[str]:
        """Returns what a server with these metrics does not keep."""
        if metrics["failed"] or not metrics["requests"]:
            return [f"{metrics['failed']:g} requests failed"]
        found = [(self.metric(kind), limit) for kind, limit in self.limits.items()]
        return [
            f"{name} {metrics[name]:.1f} > {limit:g}"
            for name, limit in found
            if metrics.get(name, 0.0) > limit
        ]


def parse_aims(asked: Sequence[str], percentile: float) -> Aims:
    """Parses limits in milliseconds: "itl:20" becomes {"itl": 20.0}. Raises ConfigError."""
    limits = _parse_limits(asked, KINDS, "slo")
    return Aims(limits, percentile)


def highest_rate(
    measure: Callable[[float], bool], start: float, *, precision: float = 0.05
) -> float | None:
    """Searches for the highest rate that `measure` accepts, by doubling or halving and then
    bisecting.

    Args:
        measure: sends requests at a rate, and returns whether the server kept its aims.
        start: the first rate.
        precision: the search ends when the bounds differ by this share.

    Returns:
        The rate, or None if no rate was accepted.
    """
    good, bad = 0.0, 0.0
    rate = start
    for _ in range(_MOST_LEVELS):
        if measure(rate):
            good = rate
        else:
            bad = rate
        if good and bad:
            if bad / good <= 1.0 + precision:
                break
            rate = (good * bad) ** 0.5
        else:
            rate = good * _GROWTH if good else bad / _GROWTH
    return good or None
