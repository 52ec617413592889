"""`GET /`: a page to chat with the model and to watch the engine, from the files in `static/`.

The files are plain HTML, CSS and JavaScript modules. They contain no secrets, so they need no key.
The routes from which the page gets its data do need one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    # The page may only load and call this server, so that text from the model can do no harm.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers revalidate each time, so that a new version shows at once. Mostly they get a 304.
    "cache-control": "no-cache",
}

_FOLDER = resources.files("quire.server") / "static"

FILES = {
    "/" if file.name == "index.html" else f"/playground/{file.name}": file.name
    for file in _FOLDER.iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}
"""Maps each path to its file. No other file is served."""


def add_playground(app: FastAPI) -> None:
    """Adds one route per file, so that no file path is ever built from a client's input."""
    for path, name in FILES.items():
        app.add_api_route(
            path, _file_handler(name), methods=["GET", "HEAD"], include_in_schema=False
        )


def add_root(app: FastAPI) -> None:
    """Adds `HEAD /` to a server without the playground, because some clients call it first."""
    app.add_api_route("/", _empty_answer, methods=["HEAD"], include_in_schema=False)


async def _empty_answer(request: Request) -> Response:
    return Response()


def _file_handler(name: str) -> Callable[[Request], Awaitable[Response]]:
    data = (_FOLDER / name).read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}
    media = _TYPES[name.rpartition(".")[2]]

    async def send(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media)

    return send
