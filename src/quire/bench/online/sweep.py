"""A load at one or several levels of concurrency, as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire.bench.gpu_meter import GpuMeter
from quire.bench.online import load
from quire.bench.online.drive import BUSY, Server, drive, processes_for
from quire.bench.online.stats import failures, summary
from quire.errors import ConfigError

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

    meter: of the server's GPUs; None adds nothing about them.
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
