"""axe finds nothing to complain about on the page: wide and light, narrow and dark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import resources, util
from typing import Any

import pytest

from tests.server.chromium import REQUIRED, launched, opened, say
from tests.server.server_process import Server
from tests.server.test_playground_chat import MARKDOWN, PNG, answer_with, delta, with_images
from tests.server.test_playground_engine import Load, live

if not os.environ.get(REQUIRED) and util.find_spec("axe_playwright_python") is None:
    pytest.skip("needs the axe-playwright-python package", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=str)
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Any]:
    width, scheme = request.param
    options = {"width": width, "color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, f"{server.url}/", **options) as opened_page:
        yield opened_page


def violations(page: Any) -> list[str]:
    """Returns axe's findings, each with the elements concerned."""
    axe = resources.files("axe_playwright_python") / "axe.min.js"
    page.evaluate(axe.read_text("utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{one['id']}: {json.dumps([n['html'][:200] for n in one['nodes']])}" for one in found]


def test_chat(page: Any) -> None:
    with_images(page)
    page.wait_for_selector("#attach:visible")
    assert violations(page) == []
    file = {"name": "dot.png", "mimeType": "image/png", "buffer": PNG}
    page.set_input_files("#attach-files", [file])
    page.wait_for_selector("#attachments canvas")
    answer_with(page, delta(reasoning_content="So."), delta(content=MARKDOWN))
    say(page, "Format")
    page.wait_for_selector(".hl-keyword")
    page.set_input_files("#attach-files", [{**file, "mimeType": "text/plain"}])
    page.wait_for_selector("#attach-error:visible")
    answer_with(page, {"error": {"message": "The engine has stopped."}})
    say(page, "Fail")
    assert violations(page) == []
    page.click("#open-key")
    assert violations(page) == []


def test_engine(page: Any, server: Server) -> None:
    live(page)
    page.wait_for_selector("#counters dd")
    with Load(server, 3):
        page.wait_for_selector(".row >> nth=2")
        page.wait_for_selector(".tree [role=treeitem]")
        assert violations(page) == []
    page.route("**/engine/live*", lambda route: route.fulfill(status=503, body="{}"))
    page.click("#live-pause")
    page.click("#live-pause")
    page.wait_for_selector("#live-state[data-state=overloaded]")
    assert violations(page) == []
