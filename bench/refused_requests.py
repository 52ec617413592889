"""Measures how long `/health` waits while clients send requests that are refused.

Starts a server on the embedded model; eight clients at a time, in a process of their own, send one
kind of body after another for some seconds, while `/health` is asked every 10 ms. Writes a JSON
record and prints a table.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_READY = re.compile(r"^Serving \S+ at (\S+)\. ", re.MULTILINE)
_CLIENTS = 8
_CHAT = "/v1/chat/completions"
_USER = {"role": "user", "content": "hi"}


def _bodies() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Returns routes and bodies by name."""
    parts = [{"type": "x", "text": ""}] * 1024
    return {
        "unknown keys, 12 MB": (_CHAT, lambda: _json({f"key{i}": 0 for i in range(800_000)})),
        "unknown keys, 0.7 MB": (_CHAT, lambda: _json({f"key{i}": 0 for i in range(49_000)})),
        "lists, 15 MB": (_CHAT, lambda: b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}"),
        "bad parts, 500 x 1024": (
            _CHAT,
            lambda: _json({"messages": [{"role": "user", "content": parts}] * 500}),
        ),
        "bad parts, 15 x 1024": (
            _CHAT,
            lambda: _json({"messages": [{"role": "user", "content": parts}] * 15}),
        ),
        "logit_bias of texts, 0.6 MB": (
            _CHAT,
            lambda: _json({"messages": [_USER], "logit_bias": {str(i): "" for i in range(49_000)}}),
        ),
        "values of unlike types, 3 MB": (
            "/v1/completions",
            lambda: _json({"prompt": [1] * 999_000 + [""]}),
        ),
        "properties of a schema, 0.5 MB": (
            _CHAT,
            lambda: _json(
                {
                    "messages": [_USER],
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": _wide_schema(16_000)},
                    },
                }
            ),
        ),
        "prompt, 15 MB": ("/v1/completions", lambda: _json({"prompt": "word " * 3_000_000})),
        "tokenize, 5.6 MB (answered)": (
            "/tokenize",
            lambda: _json({"prompt": "some words " * 510_000}),
        ),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def _server() -> Iterator[str]:
    """Yields the URL of a server that runs while the context does."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--kv-cache-gb", "0.25"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text = ""
        while (found := _READY.search(text)) is None:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise SystemExit(f"the server did not start:\n{text}")
            text += line
        threading.Thread(target=process.communicate, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()


def _wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


def _connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)


def _send(url: str, path: str, body: bytes, seconds: float) -> Counter[int]:
    """Sends a body by eight clients, again and again; returns how often each status came."""
    end = time.monotonic() + seconds
    codes: Counter[int] = Counter()

    def client() -> None:
        connection = _connection(url)
        while time.monotonic() < end:
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                codes[answer.status] += 1
            except OSError:  # the server may close a connection whose body it does not read
                codes[0] += 1
                connection.close()

    clients = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return codes


def _measure(url: str, name: str, size: int, seconds: float) -> dict[str, Any]:
    """Returns the waits of `/health`, in ms, and what was answered."""
    senders = None
    if size:
        command = [sys.executable, __file__, "--send", name, "--url", url]
        senders = subprocess.Popen(
            [*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True
        )
        time.sleep(1)  # it makes the body
    end = time.monotonic() + seconds
    waits = []
    connection = _connection(url)
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        waits.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    cuts = statistics.quantiles(waits, n=100)
    return {
        "bytes": size,
        "health_asked": len(waits),
        "health_p50_ms": round(cuts[49], 1),
        "health_p99_ms": round(cuts[98], 1),
        "health_max_ms": round(max(waits), 1),
        "answers": json.loads(senders.communicate()[0]) if senders else {},
    }


def _print_table(cases: dict[str, dict[str, Any]]) -> None:
    rows = [("body", "p50 ms", "p99 ms", "max ms", "answers")]
    for name, case in cases.items():
        waits = (str(case[f"health_{key}_ms"]) for key in ("p50", "p99", "max"))
        answers = ", ".join(f"{count} x {code}" for code, count in case["answers"].items())
        rows.append((name, *waits, answers))
    for name, *waits, answers in rows:
        sys.stdout.write(f"{name:32}{''.join(f'{wait:>9}' for wait in waits)}  {answers}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of body")
    parser.add_argument("--out", type=Path, default=None, help="file of the record")
    parser.add_argument("--send", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    bodies = _bodies()
    if args.send is not None:
        path, body = bodies[args.send]
        codes = _send(args.url, path, body(), args.seconds)
        sys.stdout.write(json.dumps({str(code): codes[code] for code in sorted(codes)}))
        return
    with _server() as url:
        found = {"none": _measure(url, "", 0, args.seconds)}
        for name, (_, body) in bodies.items():
            found[name] = _measure(url, name, len(body()), args.seconds)
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": "CPU",
        "cpu": platform.processor() or platform.machine(),
        "clients": _CLIENTS,
        "cases": found,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    _print_table(found)


if __name__ == "__main__":
    main()
