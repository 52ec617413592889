"""A feature from another package, in one folder, in a real server without a patch.

The folder `constant_token/` adds a flag, a request field of three APIs, a call, a route,
statistics, a metric, a row of the live view, a column of the batch and a hook in the head. The
server finds it by its entry point, in a package's metadata.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import MODEL, WAIT, Server, start_server
from tests.slow import slow

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("constant_token")
METADATA = "Metadata-Version: 2.1\nName: constant-token\nVersion: 1.0\n"
ENTRY = "[quire.features]\nconstant_token = {}:FEATURE\n"
TOKENS = 5
NONE, FLAG, FIELD = -1, 70, 90
"""No token, and two that have a text and end no completion."""


def install(folder: Path, module: str) -> dict[str, str]:
    """Writes a package's metadata, and returns the variables of processes that find it."""
    metadata = folder / "constant_token-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY.format(module))
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(params=[slow(()), ("--api-workers", "2", "--tensor-parallel-size", "2")])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    variables = install(tmp_path, "tests.features.constant_token")
    file = tmp_path / "settings.yaml"
    file.write_text(f"constant_token: {FLAG}\n")
    # A flag in one of the servers, a key of the file in the other.
    setting = ("--constant-token", str(FLAG)) if request.param else ("--config", str(file))
    found = start_server(*setting, *request.param, variables=variables)
    yield found
    found.stop(signal.SIGKILL)


def test_a_feature_of_another_package(server: Server) -> None:
    by_flag = _complete(server)
    by_field = {
        path: _text(_post(server, path, body | {"constant_token": FIELD}))
        for path, body in REQUESTS.items()
    }
    (letter,) = set(by_field.values())
    assert len({by_flag, letter}) == 2
    assert by_flag == by_flag[0] * TOKENS
    assert letter == letter[0] * TOKENS
    assert _complete(server) == by_flag  # a lane does not keep the token of its last request

    assert _put(server, FIELD) == {"before": FLAG}
    assert _complete(server) == letter
    assert _put(server, NONE) == {"before": FIELD}
    assert _complete(server) not in (by_flag, letter)

    _check_refusals(server)
    _check_descriptions(server)
    assert server.metric("quire_constant_token_completions_total") == 3 + len(REQUESTS)
    assert server.stop() == 0


def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    variables = {**os.environ, **install(tmp_path, "no_such_module")}
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.stderr == (
        "quire: the feature no_such_module:FEATURE (package constant-token) cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module'\n"
    )
    assert done.returncode == 2


def test_the_page_shows_the_folder() -> None:
    text = (ROOT / "docs" / "adding-a-feature.md").read_text()
    shown = re.findall(
        r"^```python\n# constant_token/(\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert {name for name, _ in shown} == {file.name for file in FOLDER.glob("*.py")}
    for name, code in shown:
        text = (FOLDER / name).read_text()
        inner = textwrap.indent(code, "    ")
        assert code in text or inner in text, f"the page shows of {name}\n{code}"


def _check_refusals(server: Server) -> None:
    """A wrong value is an error of the field, and an unknown token one of the engine."""
    for path, body in REQUESTS.items():
        status, error = _refused(server, "POST", path, body | {"constant_token": -3})
        assert status == 400
        assert "constant_token" in error["message"]
    path = "/v1/completions"
    _, error = _refused(server, "POST", path, REQUESTS[path] | {"constant_token": 123456789})
    assert "token 123456789 is not in the vocabulary" in error["message"]
    status, error = _refused(server, "PUT", "/constant_token", {"token": -2})
    assert (status, "token -2 is not" in error["message"]) == (400, True)


def _check_descriptions(server: Server) -> None:
    """OpenAPI, the live view and the settings show what the feature declares."""
    described = _call(server, "GET", "/openapi.json")
    schemas = described["components"]["schemas"]
    having = [n for n, each in schemas.items() if "constant_token" in each.get("properties", ())]
    assert {"Request.ChatRequest", "Request.CreateRequest", "Request.MessagesRequest"} <= {*having}
    assert described["paths"]["/constant_token"]["put"]["requestBody"]["required"]

    with urllib.request.urlopen(f"{server.url}/engine/live?frames=1", timeout=WAIT) as stream:
        event = json.loads(stream.read().decode().partition("data: ")[2])
    assert event["rows"]["constant_token.completions"] == "Completions of one token"
    assert event["stats"]["constant_token"]["completions"] == 3 + len(REQUESTS)

    assert _call(server, "GET", "/server_info")["engine"]["args"]["constant_token"] == FLAG


# Requests to the server.

_MESSAGES = [{"role": "user", "content": "Once"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "Once", "max_tokens": TOKENS},
    "/v1/chat/completions": {"model": MODEL, "messages": _MESSAGES, "max_tokens": TOKENS},
    "/v1/responses": {"model": MODEL, "input": "Once", "max_output_tokens": TOKENS},
    "/v1/messages": {"model": MODEL, "messages": _MESSAGES, "max_tokens": TOKENS},
}
"""A body for each API, by its route."""


def _complete(server: Server) -> str:
    body = REQUESTS["/v1/completions"] | {"temperature": 0.0}
    return _text(_post(server, "/v1/completions", body))


def _text(answer: dict[str, Any]) -> str:
    """Returns the generated text of an answer of any API."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    else:
        content = answer["content"] if "content" in answer else answer["output"][0]["content"]
        text = content[0]["text"]
    return str(text)


def _post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return _call(server, "POST", path, body)


def _put(server: Server, token: int) -> dict[str, Any]:
    return _call(server, "PUT", "/constant_token", {"token": token})


def _refused(
    server: Server, method: str, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Returns the status and the error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        _call(server, method, path, body)
    error: dict[str, Any] = json.load(caught.value)["error"]
    return caught.value.code, error


def _call(
    server: Server, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=WAIT) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
