"""`GET /`: a page to chat with the model and to watch the engine, from the files in `static/`.

The files are plain HTML, CSS and JavaScript modules. They contain no secrets, so they need no key.
The routes from which the page gets its data do need one. One module is made here: the list of
sampling parameters, which `SamplingParams` declares. `static/vendor/` holds the modules of other
projects, with their licenses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.sampling_params import PARAMETERS, DeclaredParameter

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

_PARAMETERS = "parameters.js"

FILES = {
    "/" if name == "index.html" else f"/playground/{name}": name
    for name in (
        _PARAMETERS,
        *(file.name for file in _FOLDER.iterdir()),
        *(f"vendor/{file.name}" for file in (_FOLDER / "vendor").iterdir()),
    )
    if name.rpartition(".")[2] in _TYPES
}
"""Maps each path to its file. No other file is served."""

_SAFE_INTEGER = 2**53 - 1
"""Greatest integer that JavaScript reads exactly."""


def content(name: str) -> bytes:
    """Returns the bytes of one of the page's files."""
    if name == _PARAMETERS:
        fields = [_form_field(p) for p in PARAMETERS if p.declared.step]
        return f"export const PARAMETERS = {json.dumps(fields)};\n".encode()
    return (_FOLDER / name).read_bytes()


def _form_field(parameter: DeclaredParameter) -> dict[str, object]:
    """Describes a number of the form; `otherwise` is the text in its empty field."""
    declared = parameter.declared
    bounds = {"min": declared.low, "max": declared.high}
    return {
        "name": parameter.name,
        "label": parameter.name.replace("_", " ").capitalize(),
        "kind": "integer" if parameter.kind is int else "number",
        "otherwise": "none" if parameter.optional else f"{parameter.default:g}",
        **{name: bound for name, bound in bounds.items() if abs(bound) <= _SAFE_INTEGER},
        "step": declared.step,
        "help": parameter.summary,
    }


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
    data = content(name)
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}
    media = _TYPES[name.rpartition(".")[2]]

    async def send(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media)

    return send
