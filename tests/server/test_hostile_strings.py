"""Hostile strings in every field of every call.

The caller gets an error, and the engine keeps running for the others.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import MODEL, Server, start_server
from tests.server.test_faults import child

TEXTS = (
    "./" + "c" * 300, "~nosuchuser/x", "é" * 200, "a/" + "c" * 300, "../" * 2000, "/dev/zero",
    "/proc/self/mem", "~", "\x00", "a\x00b/c", "\ud800", "x" * 100_000, "http://[", "http://a:9999999",
    "http://\x00", "//", "", " ", "\n", "%00", "\u202e", "{{7*7}}", "-1", "null",
)  # fmt: skip
NUMBERS = (-1, 2**31, 2**63, 2**64, 10**30, 1e308)
GRANT = {"tokens": [1] * 16, "first": 0, "reader": "a", "epoch": "b", "cache_salt": "c"}
FACTS = {
    "protocol": 1, "version": "0", "transport": "tcp", "model": "m", "dtype": "d",
    "kv_cache_dtype": "k", "block_size": 16, "groups": ["g"], "drafts": "",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "name", "lora_path": "path"},
    "/v1/unload_lora_adapter": {"lora_name": "name"},
    "/kv/handshake": FACTS,
    "/kv/prefill": GRANT,
    "/kv/peers": {"peers": ["http://127.0.0.1:9"]},
    "/v1/completions": {
        "model": MODEL, "prompt": "Once", "max_tokens": 2, "cache_salt": "salt", "user": "u",
        "stop": ["s"], "bad_words": ["b"], "request_id": "r", "structured_outputs": {"regex": "a"},
    },
    "/v1/chat/completions": {
        "model": MODEL, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 2,
        "cache_salt": "salt",
    },
    "/v1/embeddings": {"model": MODEL, "input": "Once", "cache_salt": "salt"},
}  # fmt: skip


def spoiled(value: Any, other: Any) -> Iterator[Any]:
    """Yields a value with each of its leaves of the type of `other` replaced."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: made} for made in spoiled(inner, other))
    elif isinstance(value, list):
        yield from ([made] for made in spoiled(value[0], other))
    elif isinstance(value, str) == isinstance(other, str):
        yield other


def send(server: Server, path: str, body: object, **headers: str) -> int:
    method = "PUT" if path == "/kv/peers" else "POST"
    data = json.dumps(body).encode()
    asked = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("adapters")
    server = start_server("--lora-dir", str(folder), "--enable-lora", "--role", "both")
    yield server
    server.stop()


@pytest.mark.parametrize("path", BODIES)
def test_no_string_ends_the_engine(server: Server, path: str) -> None:
    engine = child(server, "quire.engine.process.process")
    wrong = []
    for other in (*TEXTS, *NUMBERS):
        for body in spoiled(BODIES[path], other):
            status = send(server, path, body)
            if not (200 <= status < 500 or status == 501):
                wrong.append((status, str(body)[:300]))
    assert not wrong
    assert child(server, "quire.engine.process.process") == engine
    assert send(server, "/v1/completions", BODIES["/v1/completions"]) == 200


@pytest.mark.parametrize("name", ["x-quire-prefill", "traceparent", "x-request-id"])
def test_no_header_ends_the_engine(server: Server, name: str) -> None:
    body = BODIES["/v1/completions"]
    texts = [text for text in TEXTS if text.isascii() and text.isprintable() and len(text) < 5000]
    for text in texts:
        assert 200 <= send(server, "/v1/completions", body, **{name: text}) < 500
    assert send(server, "/v1/completions", body) == 200
