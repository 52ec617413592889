"""Routes for operators, and chat templates of requests, on a real server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire import __version__
from tests.server.server_process import MODEL, Server
from tests.slow import WHOLE

HELLO: list[Any] = [{"role": "user", "content": "Hello there!"}]
OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ mood }}"
KEYS = '[boss]\nkey = "boss-key"\nadmin = true\n\n[user]\nkey = "user-key"\n'


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
"""Takes all the seconds that a template may have."""


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_version_ping_and_load(server: Server) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}/ping")
        assert (answer.status_code, answer.content) == (200, b"")
    load = httpx.get(f"{server.url}/load").json()
    assert set(load) == {"server_load", "running", "waiting", "kv_tokens", "checkpoint"}
    assert load["server_load"] == load["running"] + load["waiting"]


def test_the_load_counts_requests(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert httpx.get(f"{server.url}/load").json()["running"] >= 1
    stream.close()


def test_admins_and_others(launch: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    server = launch("--api-key-file", str(file), "--trust-request-chat-template")
    assert httpx.get(f"{server.url}/ping").status_code == 200
    for method, path in (("GET", "/server_info"), ("POST", "/reset_prefix_cache")):
        assert httpx.request(method, server.url + path).status_code == 401
        statuses = {}
        for key in ("user-key", "boss-key"):
            answer = httpx.request(method, server.url + path, headers=headers(key))
            statuses[key] = answer.status_code
        assert statuses == {"user-key": 403, "boss-key": 200}
        refused = httpx.request(method, server.url + path, headers=headers("user-key"))
        assert refused.json()["error"]["code"] == "not_an_admin"
    for path in ("/version", "/load"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers=headers("user-key")).status_code == 200
    info = httpx.get(f"{server.url}/server_info", headers=headers("boss-key"))
    assert info.json()["version"] == __version__
    assert info.json()["model"] == MODEL
    assert info.json()["engine"]["scheduler"]["max_model_len"] == 2048
    assert "boss-key" not in info.text
    _forgets_prefixes(server)
    _takes_templates(server)


def _forgets_prefixes(server: Server) -> None:
    body = {"prompt": "Once upon a time there was a fox. " * 20, "max_tokens": 1}

    def cached() -> int:
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body, headers=headers("user-key"), timeout=60
        )
        count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached() == 0
    assert cached() > 0
    answer = httpx.post(f"{server.url}/reset_prefix_cache", headers=headers("boss-key"))
    assert answer.json() == {"reset": True}
    assert cached() == 0


def _takes_templates(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="user-key", max_retries=0)

    def chat(template: str, **extra: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=2,
            extra_body={"chat_template": template, "return_token_ids": True, **extra},
        )

    answer = chat(OWN, chat_template_kwargs={"mood": "glad"})
    text = httpx.post(
        f"{server.url}/detokenize",
        json={"tokens": answer.prompt_token_ids},
        headers=headers("user-key"),
    ).json()["prompt"]
    assert text == "[user] Hello there!\nglad"
    for template, param in (
        ("{% for %}", "chat_template"),
        ("{{ raise_exception('no') }}", "messages"),
        *([(ENDLESS, None)] if WHOLE in os.environ else []),
        ("{{ ''.__class__.__mro__ }}", "messages"),
        ("x" * 65_537, "chat_template"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(template)
        if param is not None:
            assert caught.value.body["param"] == param  # type: ignore[index]
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert plain.usage is not None


def test_templates_need_the_flag(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="trust-request-chat-template") as caught:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body={"chat_template": OWN}
        )
    assert caught.value.body["param"] == "chat_template"  # type: ignore[index]


def test_apply_template(server: Server) -> None:
    def post(**body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/apply-template", json=body)

    prompt = post(messages=HELLO).json()["prompt"]
    assert "Hello there!" in prompt
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": HELLO}).json()["tokens"]
    found = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()
    assert found == {"prompt": prompt}
    shorter = post(messages=HELLO, add_generation_prompt=False).json()["prompt"]
    assert prompt.startswith(shorter)
    assert len(shorter) < len(prompt)
    for body, param in (
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO, "chat_template": OWN}, "chat_template"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    ):
        answer = post(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
