"""Measures how long `/health` waits while clients send requests that are refused.

Starts a server on the embedded model; eight clients at a time send one kind of body after another
for some seconds, while `/health` is asked every 10 ms. Writes a JSON record.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

_READY = re.compile(r"^Serving \S+ at (\S+)\. ", re.MULTILINE)
_CLIENTS = 8
_CHAT = "/v1/chat/completions"
_USER = {"role": "user", "content": "hi"}


def _bodies() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Returns routes and bodies by name."""
    parts = [{"type": "x", "text": ""}] * 1024
    return {
        "unknown keys, 12 MB": (_CHAT, lambda: _json({f"key{i}": 0 for i in range(800_000)})),
        "unknown keys, 1 MB": (_CHAT, lambda: _json({f"key{i}": 0 for i in range(90_000)})),
        "lists, 15 MB": (_CHAT, lambda: b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}"),
        "bad parts, 500 x 1024": (
            _CHAT,
            lambda: _json({"messages": [{"role": "user", "content": parts}] * 500}),
        ),
        "bad parts, 30 x 1024": (
            _CHAT,
            lambda: _json({"messages": [{"role": "user", "content": parts}] * 30}),
        ),
        "logit_bias of texts, 1 MB": (
            _CHAT,
            lambda: _json({"messages": [_USER], "logit_bias": {str(i): "" for i in range(95_000)}}),
        ),
        "prompt, 15 MB": ("/v1/completions", lambda: _json({"prompt": "word " * 3_000_000})),
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


def _measure(url: str, path: str, body: bytes, seconds: float) -> dict[str, Any]:
    """Returns the waits of `/health`, in ms, and what was answered."""
    end = time.monotonic() + seconds
    codes: list[int] = []

    def send() -> None:
        headers = {"content-type": "application/json"}
        with httpx.Client(base_url=url, timeout=120) as http:
            while time.monotonic() < end:
                codes.append(http.post(path, content=body, headers=headers).status_code)

    clients = [threading.Thread(target=send) for _ in range(_CLIENTS)] if body else []
    for client in clients:
        client.start()
    waits = []
    with httpx.Client(base_url=url, timeout=120) as http:
        while time.monotonic() < end:
            began = time.perf_counter()
            http.get("/health")
            waits.append((time.perf_counter() - began) * 1000)
            time.sleep(0.01)
    for client in clients:
        client.join()
    cuts = statistics.quantiles(waits, n=100)
    return {
        "bytes": len(body),
        "health_asked": len(waits),
        "health_p50_ms": round(cuts[49], 1),
        "health_p99_ms": round(cuts[98], 1),
        "health_max_ms": round(max(waits), 1),
        "answers": {str(code): codes.count(code) for code in sorted(set(codes))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of body")
    parser.add_argument("--out", type=Path, default=None, help="file of the record")
    args = parser.parse_args()
    with _server() as url:
        found = {"none": _measure(url, _CHAT, b"", args.seconds)}
        for name, (path, body) in _bodies().items():
            found[name] = _measure(url, path, body(), args.seconds)
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": "CPU",
        "cpu": platform.processor() or platform.machine(),
        "clients": _CLIENTS,
        "cases": found,
    }
    text = json.dumps(record, indent=1)
    sys.stdout.write(text + "\n")
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
