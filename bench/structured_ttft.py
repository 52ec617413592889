"""Measures the time to the first token of requests with new schemas, on a server.

    python bench/structured_ttft.py --tokenizer FOLDER                 # a GPU: Qwen3-0.6B's shape
    python bench/structured_ttft.py --model FOLDER --flags "--device cpu --kv-cache-gb 1"

One client sends requests without a schema and with a schema of 2 kB that no request has had, in
turns. With `--streams N` as many other requests run beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.tools.bench.online.drive import launched
from quire.tools.bench.record import make_record
from structured import PROMPT_LEN, write_shape
from structured_loads import closed, tickets
from tables import print_and_append


def schema(salt: int) -> str:
    """Returns a schema of about 2 kB that no request has had."""
    more = {f"field_{salt}_{i}": {"type": "string", "maxLength": 40 + i} for i in range(12)}
    return json.dumps(closed({"tickets": tickets(salt), "more": closed(more)}))


class Client:
    """Sends requests with streamed answers over one connection."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port)
        self._prompts = 0

    def seconds(self, schema: str | None = None, tokens: int = 4) -> float:
        """Returns the time to the first event of an answer of so many tokens."""
        self._prompts += 1
        # No prompt begins like one before, so none is found in the cache.
        prompt = [10 + self._prompts % 1000, id(self) % 1000, *range(20, 18 + PROMPT_LEN)]
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
        if schema is not None:
            body["structured_outputs"] = {"json": schema}
        began = time.perf_counter()
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.read(500)!r}")
        answer.readline()
        first = time.perf_counter() - began
        answer.read()
        return first


@contextlib.contextmanager
def streams(url: str, count: int) -> Iterator[None]:
    """Keeps so many requests without a schema running during the block."""
    ended = threading.Event()

    def run() -> None:
        client = Client(url)
        while not ended.is_set():
            client.seconds(tokens=256)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    if count:
        time.sleep(2)
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def measure(url: str, requests: int, beside: int) -> dict[str, float]:
    """Returns the medians of requests with and without schemas, in turns."""
    client, found = Client(url), {"plain": list[float](), "new": list[float]()}
    for salt in range(4):  # buffers grow, and what all grammars share is built, once
        client.seconds(schema(10**6 + salt))
    with streams(url, beside):
        for salt in range(requests):
            found["plain"].append(1e3 * client.seconds())
            found["new"].append(1e3 * client.seconds(schema(salt)))
    metrics = {f"{case}_ttft_ms": statistics.median(each) for case, each in found.items()}
    metrics["plain_p90_ms"], metrics["new_p90_ms"] = (
        statistics.quantiles(each, n=10)[-1] for each in found.values()
    )
    metrics["schema_ms"] = metrics["new_ttft_ms"] - metrics["plain_ttft_ms"]
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id, instead of Qwen3-0.6B's shape")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json")
    parser.add_argument("--flags", default="", help="more flags of quire serve")
    parser.add_argument("--requests", type=int, default=30, help="of each kind")
    parser.add_argument("--streams", default="0", help="requests beside, such as 0,16")
    parser.add_argument("--device", default="cuda", help="whose name is recorded")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{args.model} {args.flags}"
        if args.model is None:
            write_shape(Path(folder))
            flags = f"{folder} --tokenizer {args.tokenizer} --load-format dummy {args.flags}"
        records = []
        with launched(f"{flags} --max-model-len 1024") as (url, _):
            for beside in map(int, args.streams.split(",")):
                metrics = measure(url, args.requests, beside)
                model = args.model or "Qwen3-0.6B (dummy)"
                settings = {"streams": beside, "schema_bytes": len(schema(0)), "flags": args.flags}
                records.append(
                    make_record(
                        "structured_ttft", metrics, model=model, device=args.device,
                        settings=settings,
                    )
                )  # fmt: skip
        print_and_append(records, args.out)


if __name__ == "__main__":
    main()
