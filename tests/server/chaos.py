"""Prefill and decode servers die at random while requests run.

    python -m tests.server.chaos --requests 10000 --out bench/results/disagg_chaos.jsonl

Two servers compute prompts (one sends KV in sync, one async), two decode (one maps the others'
memory, one reads blocks from connections). With `--transport ipc` those that decode read the
others' caches, in async one of them layer by layer, as it maps their clocks. Engines, and whole
servers, are killed or stopped for longer than a lease, and started again; clients leave. Each
answer is compared with that of a server that does all of it, and is else an error for which the
server that was asked had been disturbed itself. Every so often all requests come to their end, and
each server must hold what it holds at rest. Prints JSON; the exit status is 0 if no token was
wrong, nothing was left over, nothing hung, and every error had its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.tools.bench.record import append_jsonl, make_record
from tests.server import apart
from tests.server.apart import APART
from tests.server.server_process import MODEL, start_server
from tests.server.test_faults import child

VOCAB = 128
LONGEST = 640
LEASE = 2.0
HANG_SECONDS = 90.0
"""Seconds after which a request without an answer counts as hung."""
REST_SECONDS = 60.0
"""Seconds in which a server without requests must come to rest."""
ENGINE = "quire.engine.process.process"
COUNTERS = (
    "quire_kv_fetches_total{",
    "quire_kv_grants_total{",
    "quire_kv_fetches_local_total",
    "quire_kv_blocks_received_total",
    "quire_remote_hit_tokens_total",
)

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "vocab_size": VOCAB,
    "torch_dtype": "float32",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "full": {
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "rope_theta": 10000.0,
    },
    "window": {
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "rope_theta": 10000.0, "use_sliding_window": True, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "state": {
        **_COMMON, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""Tiny models: of full layers, of full and sliding-window layers, and of full layers and recurrent
states."""

WAYS = {"tcp": ("shared memory", "connections"), "ipc": ("layers", "steps")}
"""By transport, what the first and the second server that decodes read."""

Answer = dict[int, tuple[list[int], str]]
"""By choice, its tokens and why it ended."""


@dataclass
class Job:
    """A request and its expected answer."""

    body: dict[str, Any]
    expected: Answer = field(default_factory=dict)


def make_jobs(count: int, seed: int) -> list[Job]:
    """Returns requests whose prompts share prefixes of random lengths."""
    draw = random.Random(seed)
    stems = [[draw.randrange(6, VOCAB) for _ in range(LONGEST)] for _ in range(12)]
    jobs = []
    for index in range(count):
        shared = draw.choice(stems)[: draw.randrange(8, LONGEST - 64)]
        own = [draw.randrange(6, VOCAB) for _ in range(draw.randrange(1, 40))]
        warm = draw.random() < 0.3
        body = {
            "model": MODEL,
            "prompt": shared + own,
            "max_tokens": draw.randrange(1, 24),
            "temperature": 0.1 if warm else 0.0,
            "seed": index,
            "n": draw.choice([1, 1, 2]) if warm else 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        jobs.append(Job(body))
    return jobs


class AnswerError(Exception):
    """An error instead of an answer or of the rest of one. what: an HTTP status, the code of an
    event in a stream, or "no connection"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def ask(url: str, body: dict[str, Any], leave: float | None = None) -> Answer | None:
    """Returns an answer, or None if it was cancelled after `leave` seconds. Raises AnswerError."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=HANG_SECONDS
    )
    try:
        try:
            text, headers = json.dumps(body), {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", text, headers)
            if leave is not None and not select.select([connection.sock], [], [], leave)[0]:
                return None
            response = connection.getresponse()
            if response.status != 200:
                found = json.loads(response.read())["error"]
                raise AnswerError(f"{response.status} {found['code']}")
            if not body.get("stream"):
                return answer_of(json.loads(response.read())["choices"])
            choices: list[dict[str, Any]] = []
            for event in events(response):
                if "error" in event:
                    raise AnswerError(f"in the stream: {event['error']['code']}")
                choices += event["choices"]
                if leave is not None:
                    return None
            return answer_of(choices)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            raise AnswerError("no connection") from None
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields a stream's events. Raises OSError if the last one is missing."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise ConnectionResetError("the stream has no end")


def answer_of(choices: list[dict[str, Any]]) -> Answer:
    """Returns the tokens of choices, or of pieces of them."""
    found: Answer = {}
    for choice in choices:
        tokens, why = found.get(choice["index"], ([], ""))
        found[choice["index"]] = (
            tokens + (choice["token_ids"] or []),
            choice["finish_reason"] or why,
        )
    return found


class Target:
    """A server that is killed or stopped, and restarted at its address."""

    def __init__(
        self, name: str, flags: list[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._variables = variables
        self._flags = flags
        self._log = log
        self.disturbed: list[list[float]] = []
        """When it was disturbed, and when it was as before."""
        self._kills = 0
        self.server = start_server(*flags, variables=variables)
        self.url = self.server.url
        self._rest: dict[str, Any] = {}
        self._blocks: dict[str, int] = {}
        self._counts: list[Counter[str]] = [Counter()]

    def begin(self) -> None:
        self.disturbed.append([time.monotonic(), float("inf")])

    def end(self) -> None:
        self.disturbed[-1][1] = time.monotonic()

    @property
    def quiet(self) -> bool:
        return not self.disturbed or self.disturbed[-1][1] < float("inf")

    def was_disturbed(self, begin: float) -> bool:
        """Returns whether the server was disturbed at any time since `begin`."""
        return any(until >= begin for _, until in list(self.disturbed)[-8:])

    def kill_engine(self) -> None:
        if self._kills >= 2:  # the pause before a restart doubles each time
            self.kill_all()
            return
        self._kills += 1
        self.metrics()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(child(self.server, ENGINE), signal.SIGKILL)
        time.sleep(0.3)
        self._await_ready()
        self._counts.append(Counter())

    def kill_all(self) -> None:
        """Kills the server's own process; its engine must end by itself."""
        self._kills = 0
        engine = child(self.server, ENGINE)
        self.metrics()
        self._keep_log()
        self.server.stop(signal.SIGKILL)
        deadline = time.monotonic() + REST_SECONDS
        while alive(engine):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: the engine outlived its server")
            time.sleep(0.01)
        port = str(urlsplit(self.url).port)
        self.server = start_server(*self._flags, "--port", port, variables=self._variables)
        self._await_ready()
        self._counts.append(Counter())

    def pause_engine(self, seconds: float) -> None:
        """Stops the engine's process for a while."""
        pid = child(self.server, ENGINE)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)

    def forget(self) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=HANG_SECONDS)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/reset_prefix_cache")
            connection.getresponse().read()
        connection.close()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while self.metrics().get("quire_engine_up") != 1.0:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} does not come back:\n{''.join(self.server.output)}")
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """Returns all metrics, or none if the server does not answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=HANG_SECONDS)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        except (OSError, http.client.HTTPException):
            return {}
        finally:
            connection.close()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        found = {name: float(value) for name, _, value in pairs}
        for name, value in found.items():
            if name.startswith(COUNTERS):
                self._counts[-1][name] = max(self._counts[-1][name], int(value))
        return found

    @property
    def counts(self) -> Counter[str]:
        """Returns the summed counters of all its engines so far, as last read."""
        return sum(self._counts, Counter())

    def leftovers(self) -> dict[str, float]:
        """Returns the server's resources in use beyond those at rest, after a wait for its requests
        to end."""
        deadline = time.monotonic() + REST_SECONDS
        while found := self._leftovers():
            if time.monotonic() > deadline:
                return found
            time.sleep(0.1)
        return {}

    def _leftovers(self) -> dict[str, float]:
        metrics = self.metrics()
        if not metrics:
            return {"answers": 0.0}
        pid = child(self.server, ENGINE)
        blocks: Counter[str] = Counter()
        used = {}
        for name, value in metrics.items():
            if name.startswith("quire_kv_blocks{"):
                blocks[name.split('"')[1]] += int(value)
                if 'state="used"' in name:
                    used[name] = value
        for name in ("grants_open", "fetches_open", "slots_used"):
            used[name] = metrics[f"quire_kv_{name}"]
        for name in ("running", "waiting"):
            used[name] = metrics[f"quire_requests_{name}"]
        threads = len(os.listdir(f"/proc/{pid}/task"))
        files = len(os.listdir(f"/proc/{pid}/fd"))
        rest = self._rest
        if rest.get("pid") != pid:
            if any(used.values()):
                return {name: value for name, value in used.items() if value}
            rest = self._rest = {"pid": pid, "threads": threads + 4, "files": files + 8}
            self._blocks = self._blocks or dict(blocks)
        used["threads"] = max(0, threads - rest["threads"])
        used["files"] = max(0, files - rest["files"])
        for group, count in self._blocks.items():
            used[f"blocks of group {group} missing"] = count - blocks[group]
        return {name: value for name, value in used.items() if value}

    def _keep_log(self) -> None:
        with self._log.open("a") as log:
            log.write(f"--- {self.name}\n{''.join(self.server.output)}")

    def stop(self) -> None:
        self._keep_log()
        self.server.stop(signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@dataclass(frozen=True)
class Plan:
    """The requests and disturbances of a run.

    requests: in all. clients: that ask at once. jobs: different requests. each: answers from one
    disturbance to the next. round: requests from one rest to the next.
    """

    requests: int
    seed: int = 1
    model: str = "window"
    transport: str = "tcp"
    clients: int = 12
    jobs: int = 200
    each: int = 20
    round: int = 250


class Chaos:
    """Sends requests to two decode servers, while these and two prefill servers are disturbed."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._draw = random.Random(plan.seed)
        self.ends: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.unexplained: list[str] = []
        self.left_over: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._left = 0
        self._answered = threading.Semaphore(0)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODELS[plan.model]))
        self._flags = [
            *(str(model), "--load-format", "dummy", "--seed", "3", "--skip-tokenizer-init"),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "128"),
        ]
        self._log = folder / "servers.log"
        self.jobs = make_jobs(plan.jobs, plan.seed)

    def expect(self) -> None:
        """Gets each request's answer, alone, from one server with both roles."""
        server = start_server(*self._flags)
        try:
            for job in self.jobs:
                answer = ask(server.url, job.body)
                assert answer is not None
                job.expected = answer
        finally:
            server.stop(signal.SIGKILL)

    def run(self) -> None:
        kills = ("--engine-restarts", "1000", "--lease-timeout", str(LEASE))
        flags = [*self._flags, *kills, "--kv-cache-gb", "0.004", "--max-num-seqs", "16"]
        flags += ["--transport", self.plan.transport]
        self.writers = [
            Target(
                f"prefill {mode}", [*flags, "--role", "prefill", "--kv-transfer", mode], self._log
            )
            for mode in ("sync", "async")
        ]
        peers = [word for writer in self.writers for word in ("--peer", writer.url)]
        asks = ["--role", "decode", "--remote-prefill-tokens", "32", *peers]
        self.readers = [
            Target(f"decode, {how}", [*flags, *asks], self._log, variables)
            for how, variables in zip(WAYS[self.plan.transport], ({}, {APART: "1"}), strict=True)
        ]
        self.targets = [*self.writers, *self.readers]
        try:
            begun = time.monotonic()
            asked = 0
            while asked < self.plan.requests:
                count = min(self.plan.round, self.plan.requests - asked)
                self._round(count)
                asked += count
                seconds = time.monotonic() - begun
                print(f"{asked} in {seconds:.0f} s: {dict(self.ends)}", file=sys.stderr, flush=True)
                if self.left_over or self.wrong or self.unexplained:
                    break
            self.seconds = time.monotonic() - begun
        finally:
            for target in self.targets:
                target.stop()

    # -- a round -------------------------------------------------------------------------------

    def _round(self, count: int) -> None:
        """Runs requests while it disturbs servers; then waits until all are at rest."""
        self._left = count
        clients = [
            threading.Thread(target=self._client, args=(self._draw.random(),), daemon=True)
            for _ in range(self.plan.clients)
        ]
        troubles: list[threading.Thread] = []
        for client in clients:
            client.start()
        for answered in range(count):
            if not self._answered.acquire(timeout=3 * HANG_SECONDS):
                raise SystemExit(f"a client hangs: {dict(self.ends)}")
            if answered % self.plan.each == self.plan.each // 2:
                troubles += self._disturb()
        for thread in (*clients, *troubles):
            thread.join()
        for target in self.targets:
            if found := target.leftovers():
                self.left_over.append({"server": target.name, **found})

    def _disturb(self) -> list[threading.Thread]:
        """Begins to disturb a server if possible, but never both decode servers."""
        able = [writer for writer in self.writers if writer.quiet] * 3
        if all(reader.quiet for reader in self.readers):
            able += self.readers * 2
        if not able:
            return []
        target = self._draw.choice(able)
        what = self._draw.choices(
            ["kill engine", "kill server", "stop", "stop briefly", "forget"], [8, 5, 3, 2, 3]
        )[0]
        role = target.name.split()[0].strip(",")
        self.done[f"{what}, {role}"] += 1
        target.begin()
        thread = threading.Thread(target=self._run_trouble, args=(target, what), daemon=True)
        thread.start()
        return [thread]

    def _run_trouble(self, target: Target, what: str) -> None:
        try:
            match what:
                case "kill engine":
                    target.kill_engine()
                case "kill server":
                    target.kill_all()
                case "stop":
                    target.pause_engine(1.75 * LEASE)
                case "stop briefly":
                    target.pause_engine(0.5 * LEASE)
                case "forget":
                    target.forget()
        except BaseException as error:
            self.unexplained.append(f"{what} of {target.name}: {type(error).__name__}: {error}")
        target.end()

    def _client(self, seed: float) -> None:
        draw = random.Random(seed)
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
            readers = [reader for reader in self.readers if reader.quiet] or self.readers
            # Most clients check which servers are ready, as a router does; some do not.
            reader = draw.choice(readers if draw.random() < 0.9 else self.readers)
            self._ask(draw, reader, draw.choice(self.jobs))
            self._answered.release()

    def _ask(self, draw: random.Random, reader: Target, job: Job) -> None:
        body = {**job.body, "stream": draw.random() < 0.4}
        leave = draw.choice([0.01, 0.05, 0.2, 0.5]) * draw.random() if draw.random() < 0.2 else None
        begin = time.monotonic()
        try:
            answer = ask(reader.url, body, leave)
        except TimeoutError:
            self._end("hung", f"{reader.name} gave no answer in {HANG_SECONDS} s")
            return
        except AnswerError as error:
            excused = reader.was_disturbed(begin)
            trouble = "" if excused else f"{reader.name}, not disturbed: {error.what}"
            self._end("error", trouble, error.what)
            time.sleep(0.2)
            return
        if answer is None:
            self._end("left by its client")
        elif answer == job.expected:
            self._end("equal")
        else:
            self.wrong.append({"server": reader.name, "body": body, "got": answer})
            self._end("wrong")

    def _end(self, what: str, trouble: str = "", error: str = "") -> None:
        with self._lock:
            self.ends[what] += 1
            if error:
                self.errors[error] += 1
            if trouble:
                self.unexplained.append(trouble)

    def result(self) -> dict[str, Any]:
        """Returns the results of the run."""
        counts = self._counts
        return {
            "transport": self.plan.transport,
            "requests": sum(self.ends.values()),
            "ends": dict(self.ends),
            "errors": dict(self.errors),
            "disturbances": dict(self.done),
            "engines' counters": {name: counts[name] for name in sorted(counts)},
            "wrong": len(self.wrong),
            "left over": self.left_over,
            "unexplained": self.unexplained,
            "seconds": round(self.seconds),
        }

    @property
    def _counts(self) -> Counter[str]:
        return sum((target.counts for target in self.targets), Counter())

    @property
    def good(self) -> bool:
        bad = self.wrong or self.left_over or self.unexplained or self.ends["hung"]
        return not bad and self._counts['quire_kv_fetches_total{outcome="done"}'] > 0


def run_chaos(plan: Plan, folder: Path) -> Chaos:
    """Returns the results of a plan."""
    chaos = Chaos(plan, folder)
    chaos.expect()
    chaos.run()
    return chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=sorted(MODELS), default="window")
    parser.add_argument("--transport", choices=sorted(WAYS), default="tcp")
    parser.add_argument("--out", type=Path, help="JSONL file that the record is added to")
    parser.add_argument("--keep", type=Path, help="new folder for the servers' logs")
    given = parser.parse_args()
    apart.use()
    plan = Plan(given.requests, given.seed, given.model, given.transport)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        chaos = run_chaos(plan, folder)
    result = chaos.result()
    print(json.dumps(result, indent=1))
    for wrong in chaos.wrong[:3]:
        print(json.dumps(wrong))
    if given.out is not None:
        metrics = {"requests": result["requests"], "wrong": result["wrong"]}
        metrics |= {"left_over": len(chaos.left_over), "hung": chaos.ends["hung"]}
        record = make_record("disagg_chaos", metrics, model=given.model, settings=result)
        append_jsonl(given.out, [record])
    sys.exit(not chaos.good)


if __name__ == "__main__":
    main()
