"""`/sleep` and `/wake_up` on a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.server_process import MODEL, Server

KEYS = '[boss]\nkey = "boss-key"\nadmin = true\n\n[user]\nkey = "user-key"\n'


def post(server: Server, path: str, key: str = "boss-key") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, headers=headers, timeout=120)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_tokens": 12, **options}
    return client.completions.create(model=MODEL, prompt="Once upon a time", **options)


def test_sleep(launch: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    server = launch("--api-key-file", str(file), "--public-metrics")
    client = server.client(api_key="user-key")
    before = [complete(client, seed=7), complete(client, temperature=0.0)]
    _refuses(server, client)
    for level in (1, 2):
        answer = post(server, f"/sleep?level={level}")
        assert answer.json() == {"is_sleeping": True, "level": level}
    _sleeps(server, client)
    assert post(server, "/wake_up").json() == {"is_sleeping": False, "level": 0}
    assert server.metric("quire_engine_asleep") == 0
    after = [complete(client, seed=7), complete(client, temperature=0.0)]
    assert [a.choices[0].text for a in after] == [b.choices[0].text for b in before]
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert post(server, "/wake_up").json() == {"is_sleeping": False, "level": 0}
    post(server, "/sleep")  # a server that sleeps stops as others do
    assert server.stop() == 0


def _sleeps(server: Server, client: openai.OpenAI) -> None:
    for ask in (
        lambda: complete(client),
        lambda: client.embeddings.create(model=MODEL, input="a"),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            ask()
        assert caught.value.status_code == 503
        assert caught.value.code == "asleep"
        assert int(caught.value.response.headers["retry-after"]) > 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/ready").json()["error"]["code"] == "asleep"
    asked = httpx.get(f"{server.url}/is_sleeping", headers={"Authorization": "Bearer user-key"})
    assert asked.json() == {"is_sleeping": True, "level": 2}
    assert server.metric("quire_engine_asleep") == 1
    assert server.metric("quire_engine_up") == 0


def _refuses(server: Server, client: openai.OpenAI) -> None:
    for path in ("/sleep", "/wake_up"):
        assert post(server, path, "user-key").json()["error"]["code"] == "not_an_admin"
    for query, param in (("level=3", "level"), ("level=x", "level"), ("tags=weights", "tags")):
        answer = post(server, f"/sleep?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    stream = complete(client, max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    answer = post(server, "/sleep")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "requests_running")
    assert next(iter(stream)).choices[0].finish_reason is None
    stream.close()
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "the stream's end")
