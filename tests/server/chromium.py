"""A headless Chromium, if the machine has one, and helpers for tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REQUIRED = "QUIRE_TESTS_NEED_BROWSER"
"""The variable with which tests fail, rather than skip, without a browser."""

if os.environ.get(REQUIRED):
    from playwright import sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")

WAIT = 60_000
"""Milliseconds that anything may take; the machine may be busy."""


def chromium_path() -> str | None:
    """Returns the browser in `QUIRE_TEST_CHROMIUM` or the system's; None: playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    found = (shutil.which(name) for name in names)
    return os.environ.get("QUIRE_TEST_CHROMIUM") or next(filter(None, found), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser; without one the test is skipped, or fails if `REQUIRED` is set."""
    with playwright.sync_playwright() as driver:
        # A container's root has no sandbox; pages come from the tests' own servers only.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            browser = driver.chromium.launch(executable_path=chromium_path(), args=flags)
        except playwright.Error as error:
            stop = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
            stop(
                "no Chromium: apt-get install chromium, or name one with QUIRE_TEST_CHROMIUM "
                f"({str(error).splitlines()[0]})"
            )
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any, url: str, *, width: int = 1280, height: int = 800, **options: Any
) -> Iterator[Any]:
    """Opens the page at `url`. Logged errors and requests to other hosts fail the test."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    wrong: list[str] = []
    origin = url.partition("#")[0]
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Sec" in said.text else None)
    page.on(
        "request", lambda asked: None if asked.url.startswith(origin) else wrong.append(asked.url)
    )
    page.goto(url)
    yield page
    context.close()
    assert [each for each in wrong if not each.startswith("blob:")] == []


def say(page: Any, text: str) -> None:
    """Sends a message and waits for the whole answer."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    page.wait_for_selector(".turn:last-child .answer[aria-busy=false] .actions button")
