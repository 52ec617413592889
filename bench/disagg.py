"""Prefill and decode apart on two GPUs, beside servers that do both on the same two.

        python bench/disagg.py --results bench/results                 # Qwen3-8B's shape, two GPUs
    python bench/disagg.py --results bench/results --only ipc      # setups with that name
    python bench/disagg.py --only ipc-async --part handover        # one part of one setup
    python bench/disagg.py --results bench/results --table         # show the records so far
    python bench/disagg.py --only ipc-async --part flood --trace /tmp/trace    # long steps
    python bench/disagg.py --try                                   # a CPU, the embedded model

Weights and prompts are random. Each setup starts by itself and gets its own GPUs through
CUDA_VISIBLE_DEVICES. It has three parts:

flood     Streams decode alone (`rest_itl_…`), then while clients send new long prompts one after
          the other. Measures the time between a stream's tokens (ITL). Contexts grow during the
          run, and steps take longer. So `…_steady` are ratios to the median within a quarter of a
          second. With --trace, `disagg_trace.py` finds the causes of long steps in a trace.

handover  Prompts come one at a time. Measures the time to the first token on both servers, the
          extra time of the KV transfer, and its rate.

loads     Requests in a closed loop, with long prompts or long answers. Measures throughput, TTFT
          and ITL.

A part that takes too long is ended with its servers. The report names it, and also the setups
without time left. Records are appended to RESULTS/disagg/CARD.jsonl. A table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from disagg_trace import causes
from gpu_table import card_name, slug
from quire.tools.bench.online.client import Answer
from quire.tools.bench.online.drive import drive, processes_for
from quire.tools.bench.online.load import Ask, Lengths, body, random_asks
from quire.tools.bench.online.sweep import failures, summary
from quire.tools.bench.record import (
    BenchRecord,
    append_jsonl,
    format_table,
    make_record,
    read_jsonl,
)

HERE = Path(__file__).resolve().parent
NAME = "bench"
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_AFTER = 2.5
"""Seconds behind a flood for which the streams that are traced go on alone."""
_TRACE_SECONDS = 1.5
"""Seconds until a trace is in its file."""
_SERVING = re.compile(r"^Serving \S+ at ")
_SHOWN = (
    "itl_mean_ms", "itl_p50_ms", "itl_p99_ms", "itl_p99_to_p50", "itl_p99_to_p50_steady",
    "rest_itl_p50_ms", "rest_itl_p99_ms", "rest_itl_p99_to_p50_steady", "step_p99_to_p50_steady",
    "step_over_line_p50_ms", "step_over_line_p99_ms", "step_host_p99_ms", "flood_s",
    "flood_p50_ms", "output_tok_s", "request_s", "ttft_p50_ms",
    "ttft_p99_ms", "computed_ms", "handover_ms", "handover_server_ms", "ask_ms", "layer_ms",
    "megabytes", "link_ms", "remote", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests in a closed loop: so many at once, of so many tokens in and out."""

    name: str
    streams: int
    requests: int
    input: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the loads.

    Attributes:
        streams: number of decoding streams, with prompts of `stream_prompt` tokens and answers of
            `stream_tokens`.
        ramp: seconds before the streams are measured.
        rest: seconds in which the streams are measured alone.
        flood: seconds in which the streams are measured while long prompts arrive.
        flood_prompt: tokens of such a prompt; `flooders` of them are in progress at once.
        handovers: number of prompts of `handover_prompt` tokens.
        remote: see --remote-prefill-tokens.
        layers: layers of the model.
        part: the most seconds of a part.
    """

    streams: int
    stream_prompt: int
    stream_tokens: int
    ramp: float
    rest: float
    flood: float
    flood_prompt: int
    flooders: int
    handovers: int
    handover_prompt: int
    loads: tuple[Load, ...]
    remote: int
    length: int
    layers: int
    part: float = 60.0


BIG = Sizes(
    streams=64, stream_prompt=128, stream_tokens=6000, ramp=3.5, rest=2.5, flood=7.0,
    flood_prompt=8192, flooders=2, handovers=12, handover_prompt=2048,
    loads=(Load("in", 32, 64, 4096, 64), Load("out", 128, 128, 512, 384)),
    remote=1024, length=9216, layers=36,
)  # fmt: skip
TRIED = Sizes(
    streams=2, stream_prompt=16, stream_tokens=1500, ramp=4.0, rest=3.0, flood=8.0,
    flood_prompt=512, flooders=1, handovers=3, handover_prompt=512,
    loads=(Load("in", 2, 4, 512, 8), Load("out", 2, 4, 32, 32)),
    remote=64, length=2048, layers=6,
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Servers that answer at one address.

    Attributes:
        transport, mode: see --transport and --kv-transfer; "" for servers without a split.
        gpus: replicas of a server without a split.
        parts: names of the measured parts.
    """

    transport: str = ""
    mode: str = ""
    gpus: int = 1
    parts: tuple[str, ...] = ("flood", "handover", "loads")

    @property
    def name(self) -> str:
        if self.transport:
            return f"split-{self.transport}-{self.mode}"
        return "aggregated-1gpu" if self.gpus == 1 else f"aggregated-{self.gpus}gpus"


WAYS = (("ipc", "async"), ("tcp", "async"), ("ipc", "sync"), ("tcp", "sync"))


def setups(small: bool) -> list[Setup]:
    """Returns the setups, the most important first; of a small model only the flood."""
    if small:
        alone = Setup(parts=("flood",))
        return [alone, *(Setup(transport, mode, parts=("flood",)) for transport, mode in WAYS)]
    first, second, *others = (Setup(*way) for way in WAYS)
    short = [replace(each, parts=("flood", "handover")) for each in others]
    both = Setup(gpus=2, parts=("flood", "loads"))
    return [first, both, Setup(parts=("flood", "handover")), second, *short]


# -- servers -----------------------------------------------------------------------------------


@dataclass
class Servers:
    """Running servers.

    Attributes:
        url: address for requests.
        writer: address of the prefill server, or "".
        trace: folder of the decoding server's trace, or None.
        said: lines that each server printed.
    """

    url: str = ""
    writer: str = ""
    trace: Path | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)

    def start(self, flags: Sequence[str], gpus: str | None) -> str:
        """Starts a server, and returns its address without waiting until it is ready.

        Args:
            gpus: the server's CUDA_VISIBLE_DEVICES; None leaves it as it is.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *flags, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"QUIRE_TUNE_TABLES": "off", **os.environ, "PYTHONUNBUFFERED": "1", **visible},
            start_new_session=True,
        )
        self.processes.append(process)
        self.said.append([])
        return f"http://127.0.0.1:{port}"

    def await_ready(self, seconds: float) -> None:
        """Waits for all servers. Raises RuntimeError with the last lines of one that fails."""
        deadline = time.monotonic() + seconds
        for process, said in zip(self.processes, self.said, strict=True):
            ready = threading.Event()
            threading.Thread(target=_listen, args=(process, said, ready), daemon=True).start()
            while not ready.wait(0.1):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("a server did not start:\n" + "".join(said[-25:]))

    def stop(self) -> None:
        """Ends all processes. Idempotent."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listen(process: subprocess.Popen[str], said: list[str], ready: threading.Event) -> None:
    for line in process.stdout or ():
        said.append(line)
        if _SERVING.match(line):
            ready.set()


@contextlib.contextmanager
def running(
    setup: Setup, model: Sequence[str], sizes: Sizes, gpus: bool, hidden: bool, trace: Path | None
) -> Iterator[Servers]:
    """Yields the servers of a setup when they are ready.

    Args:
        hidden: neither role sees the GPU of the other.
        trace: folder for the trace of the decoding server.
    """
    flags = [
        *model, "--served-model-name", NAME, "--skip-tokenizer-init", "--max-model-len",
        str(sizes.length), "--log-level", "warning",
    ]  # fmt: skip
    servers = Servers(trace=trace)
    traced = [] if trace is None else ["--trace-dir", str(trace)]
    try:
        if not setup.transport:
            several = ["--data-parallel-size", str(setup.gpus)] if setup.gpus > 1 else []
            numbers = ",".join(map(str, range(setup.gpus)))
            servers.url = servers.start([*flags, *several, *traced], numbers if gpus else None)
        else:
            way = ["--transport", setup.transport, "--kv-transfer", setup.mode]
            # A server uses the first visible GPU.
            visible = ("1", "0") if hidden else ("1,0", "0,1")
            writer = [*flags, "--role", "prefill", *way]
            servers.writer = servers.start(writer, visible[0] if gpus else None)
            asks = ["--peer", servers.writer, "--remote-prefill-tokens", str(sizes.remote)]
            reader = [*flags, "--role", "decode", *way, *asks, *traced]
            servers.url = servers.start(reader, visible[1] if gpus else None)
        servers.await_ready(_START_SECONDS)
        yield servers
    finally:
        servers.stop()


# -- requests ----------------------------------------------------------------------------------


def ask(
    url: str, asks: Sequence[Ask], streams: int, timeout: float
) -> tuple[list[Answer], list[str]]:
    """Returns the answers of a closed loop, and what failed."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    bodies = [body(each, NAME, "completions", sampling) for each in asks]
    answers, _ = drive(
        f"{url}/v1/completions", {}, bodies,
        concurrency=streams, processes=processes_for(streams, None), timeout=timeout,
    )  # fmt: skip
    return answers, failures(answers)


def prompts(count: int, tokens: int, output: int, seed: int) -> list[Ask]:
    return random_asks(count, Lengths(input_len=tokens, output_len=output), 1000, seed)


def counters(url: str) -> dict[str, float]:
    """Returns the server's metrics of one value, by name; those of several are summed."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found


class Flood:
    """Clients that send new prompts one after the other.

    Attributes:
        done: (begin, end) of each answer, in seconds of the monotonic clock.
        failed: number of requests without an answer.
    """

    def __init__(self, url: str, tokens: int, clients: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._tokens = tokens
        self._over = threading.Event()
        self.done: list[tuple[float, float]] = []
        self.failed = 0
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        draw = random.Random(os.urandom(8) + bytes([index]))
        while not self._over.is_set():
            prompt = [draw.randrange(10, 1000) for _ in range(self._tokens)]
            sent = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
            begun = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(*self._address, timeout=30)
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(sent), headers)
                answer = connection.getresponse()
                answer.read()
                good = answer.status == 200
                connection.close()
            except (OSError, http.client.HTTPException):
                good = False
            if good:
                self.done.append((begun, time.perf_counter()))
            elif not self._over.is_set():
                self.failed += 1
                time.sleep(0.1)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


# -- parts -------------------------------------------------------------------------------------


def flood(servers: Servers, sizes: Sizes) -> dict[str, float]:
    """Times the streams at rest and under the flood."""
    ask(servers.url, prompts(3, sizes.flood_prompt, 2, 7), 1, 60.0)  # the first ones connect
    before = counters(servers.url)
    found: list[list[Answer]] = []
    after = _AFTER if servers.trace is not None else 0.0
    seconds = sizes.ramp + sizes.rest + sizes.flood + after + 1.0
    asks = prompts(sizes.streams, sizes.stream_prompt, sizes.stream_tokens, 1)

    def streams() -> None:
        # Streams that are still running then are abandoned.
        found.append(ask(servers.url, asks, sizes.streams, seconds)[0])

    thread = threading.Thread(target=streams, daemon=True)
    thread.start()
    time.sleep(sizes.ramp)
    begun = time.perf_counter()
    time.sleep(sizes.rest)
    flooded = time.perf_counter()
    prompts_sent = Flood(servers.url, sizes.flood_prompt, sizes.flooders)
    time.sleep(sizes.flood)
    ended = time.perf_counter()
    prompts_sent.end()
    alone = time.perf_counter()
    thread.join()
    (answers,) = found
    if late := sum(not len(each.times) or each.times[0] > begun for each in answers):
        print(f"   {late} of {len(answers)} streams began late", flush=True)
    if early := sum(len(each.times) and each.times[-1] < ended for each in answers):
        print(f"   {early} of {len(answers)} streams ended early", flush=True)
    metrics = {**between(answers, begun, flooded, "rest_"), **between(answers, flooded, ended, "")}
    inside = [end - begin for begin, end in prompts_sent.done if end < ended]
    metrics["flood_s"] = len(inside) / (ended - flooded)
    if inside:
        metrics["flood_p50_ms"] = 1e3 * float(np.median(inside))
    metrics["failed"] = prompts_sent.failed
    if servers.writer:
        metrics["remote"] = _grown(servers.url, before, "quire_kv_blocks_received_total")
    if servers.trace is not None:
        time.sleep(_TRACE_SECONDS)
        rests = (begun, flooded), (alone, begun + seconds - sizes.ramp - 1.0)
        steps, table = causes(servers.trace, rests, (flooded, ended), sizes.streams)
        metrics |= steps
        print("\n".join(f"   {line}" for line in table), flush=True)
    return metrics


def between(answers: Sequence[Answer], begin: float, end: float, name: str) -> dict[str, float]:
    """Returns the times between tokens, of those that came within a window."""
    inside = [t[(t >= begin) & (t <= end)] for t in (each.times for each in answers)]
    found = 1e3 * np.concatenate([np.diff(t) for t in inside])
    if not len(found):
        return {}
    p50, p99 = (float(np.percentile(found, p)) for p in (50, 99))
    at = np.concatenate([t[1:] for t in inside])
    parts = [found[mask] for part in range(int(4 * (end - begin)) + 1)
             if (mask := ((at - begin) * 4).astype(int) == part).any()]  # fmt: skip
    steady = np.concatenate([part / np.median(part) for part in parts])
    return {
        f"{name}itl_mean_ms": float(found.mean()),
        f"{name}itl_p50_ms": p50,
        f"{name}itl_p99_ms": p99,
        f"{name}itl_max_ms": float(found.max()),
        f"{name}itl_p99_to_p50": p99 / p50,
        f"{name}itl_p99_to_p50_steady": float(np.percentile(steady, 99)),
    }


def handover(servers: Servers, sizes: Sizes) -> dict[str, float]:
    """Times single prompts at the decoding server and at the prefill server."""
    count, tokens = sizes.handovers, sizes.handover_prompt
    ask(servers.url, prompts(3, tokens, 2, 2), 1, 30.0)  # the first ones connect
    before = counters(servers.url)
    here, problems = ask(servers.url, prompts(count, tokens, 2, 3), 1, 30.0)
    metrics = {"ttft_p50_ms": first_tokens(here), "failed": len(problems)}
    if not servers.writer:
        metrics["layer_ms"] = metrics["ttft_p50_ms"] / sizes.layers
        return metrics
    came = max(1.0, _grown(servers.url, before, "quire_kv_fetches_total"))
    size = _grown(servers.url, before, "quire_kv_bytes_received_total") / came
    seconds = _grown(servers.url, before, "quire_kv_handover_seconds_total") / came
    asked = _grown(servers.url, before, "quire_kv_ask_seconds_total") / came
    there, problems = ask(servers.writer, prompts(count, tokens, 2, 4), 1, 30.0)
    computed = first_tokens(there)
    return {
        **metrics,
        "failed": metrics["failed"] + len(problems),
        "remote": came,
        "computed_ms": computed,
        "handover_ms": metrics["ttft_p50_ms"] - computed,
        "handover_server_ms": 1e3 * seconds,
        "ask_ms": 1e3 * asked,
        "layer_ms": computed / sizes.layers,
        "megabytes": size / 1e6,
    }


def first_tokens(answers: Sequence[Answer]) -> float:
    """Returns the median time to the first token, in milliseconds."""
    return summary(answers, percentiles=(50,)).get("ttft_p50_ms", float("nan"))


def _grown(url: str, before: dict[str, float], name: str) -> float:
    return counters(url).get(name, 0.0) - before.get(name, 0.0)


def closed_loop(servers: Servers, sizes: Sizes, load: Load) -> dict[str, float]:
    """Times requests in a closed loop, behind a few that warm up."""
    ask(servers.url, prompts(4, load.input, 4, 5), 4, 60.0)
    asks = prompts(load.requests, load.input, load.output, 6)
    answers, problems = ask(servers.url, asks, load.streams, 60.0)
    for problem in problems:
        print(f"   {problem}", flush=True)
    return summary(answers, percentiles=(50, 99))


def link_rates() -> dict[str, float]:
    """Returns bytes a second between the memory of two GPUs, and of one and the host."""
    # The processes of clients import this module, and need no PyTorch.
    import torch

    size = 1 << 28
    here = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    there = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def rate(copy: Callable[[], object]) -> float:
        best = 0.0
        for _ in range(6):
            for each in (0, 1):
                torch.cuda.synchronize(each)
            begun = time.perf_counter()
            copy()
            for each in (0, 1):
                torch.cuda.synchronize(each)
            best = max(best, size / (time.perf_counter() - begun))
        return best

    return {
        "gpu_to_gpu": rate(lambda: here.copy_(there, non_blocking=True)),
        "gpu_to_host": rate(lambda: pinned.copy_(there, non_blocking=True)),
        "host_to_gpu": rate(lambda: here.copy_(pinned, non_blocking=True)),
    }


def _measure_link(pipe: Connection) -> None:
    pipe.send(link_rates())


def link() -> dict[str, float]:
    """Returns `link_rates`, measured in a process of its own, so that this one uses no GPU."""
    own, given = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_measure_link, args=(given,), daemon=True
    )
    process.start()
    given.close()
    rates: dict[str, float] = {}
    with contextlib.suppress(EOFError):  # it failed
        rates = own.recv() if own.poll(60) else {}
    process.kill()
    process.join(10)
    return rates


# -- all of it ---------------------------------------------------------------------------------


@dataclass
class Bench:
    """Measures setups one after the other.

    Attributes:
        end: time limit on the monotonic clock.
        rates: see `link_rates`.
    """

    model: str
    card: str
    flags: list[str]
    sizes: Sizes
    gpus: bool
    kept: Path | None
    end: float
    hidden: bool = False
    trace: Path | None = None
    rates: dict[str, float] = field(default_factory=dict)
    records: list[BenchRecord] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    def run(self, setup: Setup) -> None:
        """Starts a setup and measures its parts. Prints failures and does not raise them."""
        begun = time.monotonic()
        try:
            trace = None if self.trace is None else self.trace / f"{setup.name}-{time.time_ns()}"
            with running(setup, self.flags, self.sizes, self.gpus, self.hidden, trace) as servers:
                print(f"== {setup.name}: ready in {time.monotonic() - begun:.0f} s", flush=True)
                for name, part in self._parts(setup):
                    if not self._guarded(f"{setup.name} {name}", servers, part):
                        break
                for said in servers.said:
                    warned = [line for line in said if "WARN" in line or "ERROR" in line]
                    print("".join(f"   {line}" for line in warned[:5]), end="", flush=True)
        except RuntimeError as error:
            self._tell(f"{setup.name}: {error}")

    def _parts(self, setup: Setup) -> Iterator[tuple[str, Callable[[Servers], dict[str, float]]]]:
        sizes = self.sizes
        if "flood" in setup.parts:
            yield "flood", lambda servers: flood(servers, sizes)
        if "handover" in setup.parts:
            yield "handover", lambda servers: self._with_link(setup, handover(servers, sizes))
        for load in sizes.loads if "loads" in setup.parts else ():
            yield load.name, lambda servers, load=load: closed_loop(servers, sizes, load)

    def _with_link(self, setup: Setup, metrics: dict[str, float]) -> dict[str, float]:
        """Adds what the bytes alone take on the way of a transport."""
        ways = {"ipc": ("gpu_to_gpu",), "tcp": ("gpu_to_host", "host_to_gpu")}
        if "megabytes" in metrics and self.rates:
            size = 1e6 * metrics["megabytes"]
            took = sum(size / self.rates[way] for way in ways.get(setup.transport, ()))
            metrics["link_ms"] = 1e3 * took
        return metrics

    def _guarded(
        self, case: str, servers: Servers, part: Callable[[Servers], dict[str, float]]
    ) -> bool:
        """Measures a part, and keeps its record; returns whether it came to its end in time."""
        limit = min(self.sizes.part, self.end - time.monotonic())
        if limit < 5:
            self._tell(f"{case}: left out, no time")
            return True
        found: list[dict[str, float]] = []
        failed: list[str] = []

        def measure() -> None:
            try:
                found.append(part(servers))
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")

        begun = time.monotonic()
        thread = threading.Thread(target=measure, daemon=True)
        thread.start()
        thread.join(limit)
        if not found:
            self._tell(f"{case}: {failed[0] if failed else f'no end after {limit:.0f} s'}")
            for said in servers.said:
                print("".join(f"   {line}" for line in said[-12:]), end="", flush=True)
            return bool(failed)
        record = make_record(
            case, found[0], model=self.model,
            settings={"streams": self.sizes.streams, "flood_prompt": self.sizes.flood_prompt,
                      "handover_prompt": self.sizes.handover_prompt, **self.rates},
        )  # fmt: skip
        record.card = self.card or record.card
        self.records.append(record)
        if self.kept is not None:
            append_jsonl(self.kept, [record])
        short = {name: round(found[0][name], 3) for name in _SHOWN if name in found[0]}
        print(f"   {case} ({time.monotonic() - begun:.0f} s): {short}", flush=True)
        return True

    def _tell(self, what: str) -> None:
        self.trouble.append(what.splitlines()[0])
        print(f"== {what}", flush=True)


def show(records: Sequence[BenchRecord]) -> None:
    """Prints a table for each kind of part, of the latest record of each case."""
    latest = {(each.model, each.case): each for each in records}
    kinds: dict[str, list[BenchRecord]] = {}
    for record in latest.values():
        kinds.setdefault(record.case.rpartition(" ")[2], []).append(record)
    for kind in kinds.values():
        hidden = [name for each in kind for name in each.metrics if name not in _SHOWN]
        print(format_table(kind, leave_out=hidden) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a folder of bench/configs")
    parser.add_argument("--try", dest="tried", action="store_true", help="the embedded model")
    parser.add_argument("--results", type=Path, help="a folder to keep records in")
    parser.add_argument("--only", action="append", help="setups with this in their names")
    parser.add_argument("--part", action="append", help="flood, handover or loads, and no other")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all setups")
    parser.add_argument("--table", action="store_true", help="print what was measured, and end")
    parser.add_argument("--list", action="store_true", help="name the setups, and end")
    parser.add_argument("--hidden", action="store_true", help="a role sees its own GPU only")
    parser.add_argument("--flags", default="", help="more flags of every server")
    parser.add_argument("--trace", type=Path, help="a folder for traces of the flood's steps")
    parser.add_argument("--flood-prompt", type=int, help="tokens of a flooding prompt")
    parser.add_argument("--length", type=int, help="--max-model-len of the servers")
    given = parser.parse_args()
    sizes, model, flags = BIG, given.model, given.flags.split()
    small = model == "qwen2.5-1.5b"
    chosen = setups(small)
    if given.tried:
        sizes, model = TRIED, "quire-tiny"
        chosen = [each for each in chosen if each.transport != "ipc"]
    else:
        flags = [str(HERE / "configs" / model), "--load-format", "dummy", *flags]
    if small:
        sizes = replace(sizes, layers=28)
    if given.flood_prompt:
        sizes = replace(sizes, flood_prompt=given.flood_prompt)
    if given.length:
        sizes = replace(sizes, length=given.length)
    if given.only:
        chosen = [each for each in chosen if any(part in each.name for part in given.only)]
    if given.part:
        chosen = [
            replace(each, parts=tuple(part for part in each.parts if part in given.part))
            for each in chosen
        ]
    if given.list:
        print("\n".join(f"{each.name}: {', '.join(each.parts)}" for each in chosen))
        return 0
    kept, card = None, "" if given.tried else card_name()
    if given.results is not None:
        kept = given.results / "disagg" / f"{slug(card) or 'cpu'}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
    if given.table:
        show(read_jsonl(kept) if kept is not None else [])
        return 0
    bench = Bench(
        model,
        card,
        flags,
        sizes,
        not given.tried,
        kept,
        time.monotonic() + given.seconds,
        given.hidden,
        given.trace,
    )
    if bench.gpus:
        bench.rates = link()
        print({way: f"{rate / 1e9:.0f} GB/s" for way, rate in bench.rates.items()}, flush=True)
    for setup in chosen:
        if bench.end - time.monotonic() < 20:
            bench.trouble.append(f"{setup.name}: left out, no time")
            continue
        bench.run(setup)
    show(bench.records)
    print("\n".join(f"not complete: {what}" for what in bench.trouble))
    return 1 if bench.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
