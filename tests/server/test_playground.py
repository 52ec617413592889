"""The page's files as served; other tests run them in a browser."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import httpx
import pytest

from quire.features.speculation.stats import LIVE_ROWS
from quire.sampling_params import PARAMETERS
from quire.server.args import ServerArgs
from quire.server.playground import FILES, content
from tests.server.fakes import FakeClient
from tests.server.inprocess import connect, run

STATIC = resources.files("quire.server") / "static"


def get(*paths: str, method: str = "GET", headers: Any = None, **args: Any) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        async with connect(FakeClient(), ServerArgs(**args)) as http:
            return [await http.request(method, path, headers=headers) for path in paths]

    return run(go())


def test_every_file_is_served_without_a_key_under_a_strict_policy() -> None:
    for path, response in zip(FILES, get(*FILES, api_key=("k",)), strict=True):
        assert response.status_code == 200, path
        assert response.content == content(FILES[path])
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


def test_nothing_else_is_public() -> None:
    paths = ["/v1/models", "/playground/", "/playground/index.html", "/playground//main.js"]
    statuses = [response.status_code for response in get(*paths, api_key=("k",))]
    assert statuses == [401] * len(paths)


def test_the_playground_can_be_turned_off() -> None:
    statuses = [response.status_code for response in get(*FILES, playground=False)]
    assert statuses == [405 if path == "/" else 404 for path in FILES]


@pytest.mark.parametrize("playground", [False, True])
def test_clients_may_ask_for_the_root_alone(playground: bool) -> None:
    async def go() -> httpx.Response:
        args = ServerArgs(playground=playground, api_key=("k",))
        async with connect(FakeClient(), args) as http:
            return await http.head("/")

    response = run(go())
    assert (response.status_code, response.content) == (200, b"")


def test_the_playground_works_under_a_root_path() -> None:
    paths = ["/llm/", "/llm/playground/main.js", "/llm/v1/models"]
    statuses = [r.status_code for r in get(*paths, api_key=("k",), root_path="/llm")]
    assert statuses == [200, 200, 401]


def test_a_file_that_is_known_is_not_sent_again() -> None:
    (first,) = get("/playground/main.js")
    (again,) = get("/playground/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_head() -> None:
    (response,) = get("/", method="HEAD")
    assert response.status_code == 200


OWN = sorted(name for name in FILES.values() if not name.startswith("vendor/"))


@pytest.mark.parametrize("name", OWN)
def test_files_refer_only_to_each_other(name: str) -> None:
    """References are relative, so that the page works under a path prefix, and each referenced file
    exists."""
    text = content(name).decode()
    assert len(text.splitlines()) <= 400
    references = re.findall(r'(?:src|href|from|import\() ?=? ?"([^"]+)"', text)
    for reference in references:
        if name == "index.html":
            assert f"/{reference}" in FILES
        else:
            assert f"/playground/{reference.removeprefix('./')}" in FILES
    addresses = re.findall(r"https?://[^\s\"'`]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text


def test_modules_of_others_have_their_licenses_and_load_when_needed() -> None:
    licenses = (STATIC / "vendor" / "LICENSES.txt").read_text("utf-8")
    vendored = [name for name in FILES.values() if name.startswith("vendor/")]
    assert vendored
    for name in vendored:
        assert f"\n{name.removeprefix('vendor/')}: " in licenses
        assert b"sourceMappingURL" not in content(name)
    for name in OWN:
        assert not re.search(r'(?:src|href|from) ?=? ?"[^"]*vendor/', content(name).decode())


def test_the_form_has_the_declared_parameters() -> None:
    text = content("parameters.js").decode()
    fields = {f["name"]: f for f in json.loads(text.partition(" = ")[2].removesuffix(";\n"))}
    assert list(fields) == [p.name for p in PARAMETERS if p.declared.step]
    assert fields["top_p"] == {
        "name": "top_p",
        "label": "Top p",
        "kind": "number",
        "otherwise": "1",
        "min": 0.0,
        "max": 1.0,
        "step": 0.05,
        "help": "Keep the likeliest tokens up to this total probability (nucleus sampling).",
    }
    assert fields["max_tokens"]["otherwise"] == "none"
    assert "min" not in fields["seed"]
    own = (STATIC / "params.js").read_text("utf-8")
    assert not [name for name in fields if f'name: "{name}"' in own]


def test_every_source_of_drafts_has_a_name() -> None:
    for source in ("draft", "mtp", "eagle3", "tree", "suffix"):
        assert f"sources.{source}.accepted" in LIVE_ROWS
