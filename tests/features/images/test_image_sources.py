"""Data URIs, base64 and downloads of images, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.errors import RequestError
from quire.features.images import download
from quire.features.images.download import fetch, is_public
from quire.features.images.image_reader import PixelRoom
from quire.features.images.image_sources import decode_base64, decode_data_uri, decode_frames

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        where, _, rest = self.path[1:].partition("/")
        if where == "to":
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(rest).decode())
            self.end_headers()
            return
        if where == "slow":
            time.sleep(0.5)
        self.send_response(404 if where == "missing" else 200)
        if where != "plain":
            self.send_header("Content-Type", "image/png")
        if where == "endless":
            self.end_headers()
            with_room = True
            while with_room:
                try:
                    self.wfile.write(bytes(1 << 12))
                except OSError:
                    with_room = False
            return
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server whose private address counts as public."""
    monkeypatch.setattr(download, "is_public", lambda address: True)
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://localhost:{made.server_port}"
    made.shutdown()
    made.server_close()


def get(url: str, hosts: tuple[str, ...] = ("localhost",), **more: Any) -> Any:
    return fetch(url, hosts, **({"most": 1000, "seconds": 20.0, "param": "x[0]"} | more))


def to(url: str) -> str:
    return f"/to/{base64.urlsafe_b64encode(url.encode()).decode()}"


def test_a_download(server: str) -> None:
    assert get(f"{server}/image") == (PNG, "image/png")
    assert get(f"{server}/plain") == (PNG, None)
    assert get(f"{server}{to('/image')}") == (PNG, "image/png")
    assert get(f"{server}{to(f'{server}/image?a=b')}") == (PNG, "image/png")


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("/image", {"hosts": ()}, "downloads no images .--allow-image-hosts"),
        ("/image", {"hosts": ("example.com", "*.localhost")}, "'localhost' is not allowed"),
        ("/image", {"most": 10}, "at most 10 are allowed .--max-image-bytes"),
        ("/endless", {}, "at most 1000"),
        ("/missing", {}, "status 404"),
        ("/slow", {"seconds": 0.1}, "longer than 0.1 seconds .--image-fetch-seconds"),
        (to("http://example.com/"), {"hosts": ("*.com", "localhost")}, "redirects to another host"),
        (to("http://127.0.0.1/image"), {}, "'127.0.0.1' is not allowed"),
        (to("file:///etc/passwd"), {}, "neither a data URI nor an http address"),
        (to("/" + "x" * 5000), {}, "neither"),
    ],
)
def test_refused_downloads(server: str, path: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        get(server + path, **more)
    assert error.value.param == "x[0]"


def test_a_host_that_redirects_to_itself(server: str) -> None:
    url = f"{server}/to/"
    target = base64.urlsafe_b64encode(b"./").decode()
    with pytest.raises(RequestError):
        get(url + target)


def test_private_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One private address among a host's addresses is enough to refuse it."""
    with pytest.raises(RequestError, match="'localhost' has a private address"):
        get("http://localhost/")
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 80)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RequestError, match="private address"):
        get("http://example.com/", ("example.com",))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0",
        "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1",
        "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    ["ftp://localhost/x", "http://", "http://user:a@localhost/x", "http://local host/", "//x/y",
     "http://localhost:0/", "http://localhost/\r\nX: y", "http://localhost\xe9/"],
)  # fmt: skip
def test_addresses_of_other_forms(url: str) -> None:
    with pytest.raises(RequestError):
        get(url)


def test_data_uris() -> None:
    text = base64.b64encode(PNG).decode()
    assert decode_data_uri(f"data:image/png;base64,{text}", 1000, "x") == (PNG, "image/png")
    assert decode_data_uri(f"DATA:image/png;name=a;base64,{text}", 1000, "x") == (PNG, "image/png")
    assert decode_data_uri(f"data:;base64,{text}", 1000, "x") == (PNG, None)
    assert decode_base64(text, len(PNG), "x") == PNG
    for url, message in (
        (f"data:image/png,{text}", "begins like"),
        ("data:image/png;base64,???", "not valid base64"),
        (f"data:image/png;base64,{text[:-1]}", "not valid base64"),
    ):
        with pytest.raises(RequestError, match=message):
            decode_data_uri(url, 1000, "x")
    with pytest.raises(RequestError, match="at most 10 are allowed"):
        decode_base64(text, 10, "x")


def test_frames_of_a_data_uri() -> None:
    text = base64.b64encode(PNG).decode()
    uri = f"data:video/jpeg;base64,{text},{text}"
    assert decode_frames(uri, 1000, 2, "x") == ([PNG, PNG], "video/jpeg")
    assert decode_frames(f"data:video/mp4;base64,{text}", 1000, 1, "x") == ([PNG], "video/mp4")
    with pytest.raises(RequestError, match=r"3 frames; at most 2 are allowed \(--max-video-frames"):
        decode_frames(f"{uri},", 1000, 2, "x")
    with pytest.raises(RequestError, match="at most 10 are allowed"):
        decode_frames(uri, 10, 2, "x")


def test_room_for_pixels() -> None:
    """A request waits while others have too much, and none waits for itself."""

    async def go() -> list[str]:
        room, seen = PixelRoom(100), list[str]()

        async def enter(name: str) -> None:
            await room.wait()
            seen.append(name)

        await enter("first")
        room.take(150)
        waiting = asyncio.create_task(enter("second"))
        await asyncio.sleep(0.01)
        seen.append("before")
        await asyncio.to_thread(room.give_back, 150)
        await waiting
        return seen

    assert asyncio.run(asyncio.wait_for(go(), 60)) == ["first", "before", "second"]
