"""Measures how the memory of a server's processes grows under a mixed load.

Starts a server on the embedded model; clients in this process send chats and completions (streamed
or not, some left midway), schemas never seen before, tools, embeddings, prompts of all lengths,
counts of tokens and requests that are refused. Prints the resident memory of the API's process and
of the engine's as it goes, and a table last: a server that has settled has the same memory in the
last quarter of the time as in the one before.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.tools.bench.online.drive import launched

_FLAGS = "--device cpu --kv-cache-gb 0.05 --max-num-seqs 16"
_MB = 1 << 20


def _processes(root: int) -> dict[int, int]:
    """Returns the resident bytes of a process and all below it, by their ids."""
    parents, resident = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            status = (folder / "status").read_text()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        parents[int(folder.name)] = int(fields["PPid"])
        resident[int(folder.name)] = int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    found = {root}
    while more := {id for id, parent in parents.items() if parent in found} - found:
        found |= more
    return {id: resident[id] for id in sorted(found) if id in resident}


def _words(random: random.Random, most: int) -> str:
    count = random.randrange(1, most)
    return " ".join(random.choice("abcdefghij") * random.randrange(1, 8) for _ in range(count))


def _request(random: random.Random) -> tuple[str, dict[str, Any]]:
    """Returns a request's path and body."""
    chat = {
        "messages": [{"role": "user", "content": _words(random, 60)}],
        "max_tokens": random.randrange(1, 40),
        "stream": random.random() < 0.5,
    }
    kind = random.randrange(10)
    if kind == 0:
        name = _words(random, 4)
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return "/v1/chat/completions", {**chat, "response_format": named}
    if kind == 1:
        parameters = {"type": "object", "properties": {_words(random, 3): {"type": "boolean"}}}
        function = {"name": f"f{random.randrange(10**6)}", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        return "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}
    if kind == 2:
        return "/v1/completions", {"prompt": _words(random, 600), "max_tokens": 2, "logprobs": 3}
    if kind == 3:
        return "/v1/embeddings", {"input": [_words(random, 20) for _ in range(4)]}
    if kind == 4:
        return "/tokenize", {"prompt": _words(random, 20_000)}
    if kind == 5:
        return "/v1/responses", {"input": _words(random, 20), "max_output_tokens": 16}
    if kind == 6:
        return "/v1/chat/completions", {**chat, f"unknown{random.random()}": _words(random, 5000)}
    if kind == 7:
        return "/v1/completions", {"prompt": _words(random, 40), "n": 3, "max_tokens": 8}
    return "/v1/chat/completions", chat


def _client(url: str, seed: int, end: float, answers: Counter[str]) -> None:
    numbers = random.Random(seed)
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        try:
            for _ in range(numbers.randrange(1, 20)):
                path, body = _request(numbers)
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                if body.get("stream") and numbers.random() < 0.2:
                    answer.read(10)
                    answers["left"] += 1
                    break
                answer.read()
                answers[str(answer.status)] += 1
        except OSError:
            answers["lost"] += 1
        finally:
            connection.close()


def _quarters(values: list[int]) -> list[float]:
    """Returns the mean MB of each quarter of the time."""
    count = max(1, len(values) // 4)
    parts = [values[i * count : (i + 1) * count] for i in range(4)]
    return [statistics.mean(part) / _MB for part in parts if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between measurements")
    args = parser.parse_args()
    seen: dict[int, list[int]] = {}
    answers: Counter[str] = Counter()
    with launched(_FLAGS) as (url, server):
        end = time.monotonic() + args.minutes * 60
        clients = [
            threading.Thread(target=_client, args=(url, seed, end, answers), daemon=True)
            for seed in range(args.clients)
        ]
        for client in clients:
            client.start()
        while time.monotonic() < end:
            time.sleep(args.every)
            resident = _processes(server)
            if not any(resident.values()):
                raise SystemExit("the server has stopped")
            for id, size in resident.items():
                seen.setdefault(id, []).append(size)
            shown = ", ".join(f"{id}: {size / _MB:.0f} MB" for id, size in resident.items())
            left = max(0.0, end - time.monotonic())
            sys.stdout.write(f"{left:4.0f} s left  {shown}\n")
            sys.stdout.flush()
        for client in clients:
            client.join()
    sys.stdout.write(f"{dict(answers)}\nprocess     first  MB by quarter of the time\n")
    for id, sizes in seen.items():
        if len(sizes) < 4:
            continue
        means = "".join(f"{mean:9.0f}" for mean in _quarters(sizes))
        role = "API" if id == server else "child"
        sys.stdout.write(f"{role:7}{sizes[0] / _MB:9.0f} {means}\n")


if __name__ == "__main__":
    main()
