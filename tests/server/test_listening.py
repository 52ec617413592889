"""Real servers with TLS, Unix sockets and keys from a file, and their logs."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from quire.errors import ConfigError
from quire.server.args import ServerArgs
from quire.server.process import listen
from quire.server.process.listen import bind, closing_sockets, reachable_urls, tls_context, url_of
from tests.server.server_process import MODEL, Server

ASK: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 4}


def write(tmp_path: Path, ca: trustme.CA, cert: trustme.LeafCert) -> list[str]:
    """Returns flags of a server with that certificate, which requires client certificates."""
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    cert.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for i, blob in enumerate(cert.cert_chain_pems):
        blob.write_to_path(str(tmp_path / "cert.pem"), append=i > 0)
    files = {"certfile": "cert.pem", "keyfile": "key.pem", "ca-certs": "ca.pem"}
    return [
        part for name, file in files.items() for part in (f"--ssl-{name}", str(tmp_path / file))
    ]


def test_tls_with_client_certificates_and_a_key_file(
    launch: Callable[..., Server], tmp_path: Path
) -> None:
    ca = trustme.CA()
    flags = write(tmp_path, ca, ca.issue_cert("127.0.0.1"))
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "sk-alice"\nrequests_per_minute = 3\n[bob]\nkey = "sk-bob"\n')
    server = launch(*flags, "--api-key-file", str(keys), "--log-json", "--access-log")
    assert server.url.startswith("https://127.0.0.1:")

    stranger = ssl.create_default_context()
    ca.configure_trust(stranger)
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        httpx.get(f"{server.url}/health", verify=stranger)

    known = ssl.create_default_context()
    ca.configure_trust(known)
    ca.issue_cert("client.example").configure_cert(known)
    http = httpx.Client(verify=known)
    assert http.get(f"{server.url}/health").status_code == 200
    alice = server.client(api_key="sk-alice", http_client=http)
    raw = alice.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-ratelimit-limit-requests"] == "3"
    assert raw.headers["x-ratelimit-remaining-requests"] == "2"
    assert raw.parse().choices[0].text
    stream = alice.completions.create(**ASK, stream=True)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    alice.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError) as refused:
        alice.completions.create(**ASK)
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) in range(1, 21)
    server.client(api_key="sk-bob", http_client=http).completions.create(**ASK)

    keys.write_text('[carol]\nkey = "sk-carol"\n')
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: '"1 keys"' in "".join(server.output), "the reload")
    server.client(api_key="sk-carol", http_client=http).completions.create(**ASK)
    with pytest.raises(openai.AuthenticationError):
        alice.models.list()
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.output if line.startswith("{")]
    logged = [line for line in lines if line["logger"] == "quire.access"]
    assert [(line["key"], line["status"]) for line in logged] == [
        ("", 200),
        *[("alice", 200)] * 3,
        ("alice", 429),
        ("bob", 200),
        ("carol", 200),
        ("", 401),
    ]
    assert logged[1]["end"] == "length"
    assert logged[1]["completion_tokens"] == 4
    assert "Once" not in "".join(server.output)


def test_a_unix_socket(launch: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = launch("--uds", str(path), "--root-path", "/llm", "--max-num-seqs", "1")
    assert server.url == f"unix:{path}"
    assert path.stat().st_mode & 0o007 == 0
    http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))
    client = openai.OpenAI(base_url="http://quire/llm/v1", api_key="none", http_client=http)
    assert client.completions.create(**ASK).usage.completion_tokens == 4  # type: ignore[union-attr]

    # A client that disconnects frees its lane, the only one, for the next client.
    long = {**ASK, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with http.stream("POST", "http://quire/v1/completions", json=long) as response:
        next(response.iter_lines())
    began = time.monotonic()
    assert client.completions.create(**ASK).choices
    assert time.monotonic() - began < 60
    assert server.stop() == 0
    assert not path.exists()


def test_a_unix_socket_replaces_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(ConfigError, match="there is a file of that name"):
        bind(ServerArgs(uds=str(file)))
    assert file.read_text() == "data"
    args = ServerArgs(uds=str(tmp_path / "sock"))
    sock = bind(args)
    with closing_sockets([sock], args):
        sock.listen()
        with pytest.raises(ConfigError, match="a server is there already"):
            bind(args)
    assert not (tmp_path / "sock").exists()
    with pytest.raises(ConfigError, match=r"has at most [0-9]+ bytes"):
        bind(ServerArgs(uds=str(tmp_path / ("x" * 200))))


def test_invalid_certificates_are_refused(tmp_path: Path) -> None:
    ca = trustme.CA()
    write(tmp_path, ca, ca.issue_cert("127.0.0.1"))
    cert, key, junk = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "junk.pem"))
    Path(junk).write_text("junk")
    assert tls_context(ServerArgs()) is None
    assert tls_context(ServerArgs(ssl_certfile=cert, ssl_keyfile=key)) is not None
    for certfile, keyfile in ((junk, key), (cert, junk), (cert, None)):
        with pytest.raises(ConfigError, match="cannot use") as wrong:
            tls_context(ServerArgs(ssl_certfile=certfile, ssl_keyfile=keyfile))
        assert wrong.value.param == "ssl_certfile"
    with pytest.raises(ConfigError, match="cannot use") as wrong:
        tls_context(ServerArgs(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=junk))
    assert wrong.value.param == "ssl_ca_certs"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"ssl_keyfile": __file__}, "ssl_keyfile"),
        ({"ssl_ca_certs": __file__}, "ssl_ca_certs"),
        ({"ssl_certfile": "/nowhere"}, "ssl_certfile"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"cors_credentials": True}, "cors_origins"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"api_key": ("a b",)}, "api_key"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        ServerArgs(**settings)
    assert wrong.value.param == param


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_addresses_by_which_others_reach_a_server_on_all_interfaces(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    args = ServerArgs(host=host, port=0)
    with bind(args) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert url_of(sock, args) == f"http://localhost:{port}"
        for url in reachable_urls(url_of(sock, args), host):
            address, _, found = url.removeprefix("http://").rpartition(":")
            assert not address.startswith("127.")
            assert int(found) == port
            socket.create_connection((address, port), timeout=10).close()
    monkeypatch.setattr(listen, "_own_addresses", lambda: ["10.0.0.5"])
    assert reachable_urls("https://localhost:8000", host) == ["https://10.0.0.5:8000"]
    assert reachable_urls("http://127.0.0.1:8000", "127.0.0.1") == []
    assert reachable_urls("unix:/run/socket", host) == []
