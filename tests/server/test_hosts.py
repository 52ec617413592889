"""Checks of `Host` and `Origin`, against web pages that make a local browser send requests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.server.args import ServerArgs
from quire.server.routes import PUBLIC_PATHS
from tests.server.fakes import FakeClient
from tests.server.inprocess import PROMPT, assert_error, connect, run


def ask(args: ServerArgs, headers: dict[str, str], path: str = "/v1/models") -> httpx.Response:
    async def go() -> httpx.Response:
        async with connect(FakeClient(), args) as http:
            if path == "/v1/completions":
                return await http.post(path, json=PROMPT, headers=headers)
            return await http.get(path, headers=headers)

    return run(go())


LOCAL = ServerArgs()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:80",
        "0.0.0.0:8000",
    ],
)
def test_own_names_and_addresses_are_served(host: str) -> None:
    assert ask(LOCAL, {"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "a@evil", "", "[", "::1"],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/metrics", *sorted(PUBLIC_PATHS)]
)
def test_other_names_are_refused(host: str, path: str) -> None:
    assert_error(ask(LOCAL, {"host": host}, path), 403, None, "host_not_allowed")


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"api_key": ("sesame",)},
        {"uds": "/tmp/quire"},
        {"allowed_hosts": ("*",)},
        {"allowed_hosts": ("models.example",)},
    ],
)
def test_where_names_are_not_checked_or_allowed(options: Any) -> None:
    headers = {"host": "models.example:80", "authorization": "Bearer sesame"}
    assert ask(ServerArgs(**options), headers).status_code == 200


def test_allowed_hosts_are_checked_with_keys_and_on_every_address() -> None:
    args = ServerArgs(host="0.0.0.0", api_key=("sesame",), allowed_hosts=("models.example",))
    headers = {"host": "evil.example", "authorization": "Bearer sesame"}
    assert_error(ask(args, headers), 403, None, "host_not_allowed")


@pytest.mark.parametrize(
    ("origin", "options", "status"),
    [
        ("http://localhost:8000", {}, 200),
        ("https://localhost:8000", {}, 200),
        ("http://localhost:3000", {}, 403),
        ("http://evil.example", {}, 403),
        ("null", {}, 403),
        ("http://[", {}, 403),
        ("http://localhost:3000", {"cors_origins": ("http://localhost:3000",)}, 200),
        ("null", {"cors_origins": ("*",)}, 200),
        ("https://models.example", {"allowed_hosts": ("models.example",)}, 200),
        ("http://evil.example", {"host": "0.0.0.0"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_origins(origin: str, options: Any, status: int, path: str) -> None:
    answer = ask(ServerArgs(**options), {"host": "localhost:8000", "origin": origin}, path)
    assert answer.status_code == status
    if status == 403:
        assert_error(answer, 403, None, "origin_not_allowed")
