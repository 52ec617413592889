"""The live view of the page, in a real browser on a real server at work."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.chromium import launched, opened
from tests.server.server_process import Server
from tests.server.test_faults import child

PROMPT = "You tell stories of the sea. " * 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


class Load:
    """Requests that run until they are cut off."""

    def __init__(self, server: Server, count: int) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._one, args=(i,)) for i in range(count)]

    def _one(self, number: int) -> None:
        body = {
            "messages": [
                {"role": "system", "content": PROMPT},
                {"role": "user", "content": f"Story {number}"},
            ],
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream(
            "POST", f"{self._server.url}/v1/chat/completions", json=body, timeout=60
        ) as response:
            for _ in response.iter_lines():
                if self._over.is_set():
                    return

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


def live(page: Any) -> None:
    page.click("#tab-engine")
    page.wait_for_selector("#live-state[data-state=live]")


def figure(page: Any, name: str) -> str:
    text: str = page.inner_text(f".tile:has(.name:text-is('{name}')) .value")
    return text


def test_an_engine_at_work(browser: Any, launch: Callable[..., Server]) -> None:
    server = launch("--max-num-seqs", "3", "--no-live-prompts")
    with opened(browser, f"{server.url}/") as page:
        live(page)
        page.wait_for_selector("#requests:has-text('Nothing runs')")
        page.wait_for_selector("#tree:has-text('No prefix')")
        assert figure(page, "Running") == "0"
        with Load(server, 5):
            page.wait_for_selector(".row >> nth=2")
            page.wait_for_selector(".squares i >> nth=2")
            page.wait_for_selector(".chips .chip >> nth=1")
            page.wait_for_selector(".tree [role=treeitem].busy >> nth=1")
            page.wait_for_selector(".tile:has-text('TTFT') .value:has-text('ms')")
            page.wait_for_selector(".tile:has-text('ITL') .value:has-text('ms')")
            assert (figure(page, "Running"), figure(page, "Waiting")) == ("3", "2")
            assert float(figure(page, "Prefix hits")) > 0
            label = page.locator(".row").first.get_attribute("aria-label")
            assert re.search(r"prompt of \d+ tokens, \d+ found in the cache; \d+ gener", label)
            page.locator("#pools canvas").first.focus()
            page.keyboard.press("Home")
            page.wait_for_selector("#pool-readout:has-text('request')")
            assert "holders" in page.inner_text("#pool-readout")
            page.keyboard.press("End")
            page.wait_for_selector("#pool-readout:has-text('free')")
            page.locator(".tree [role=treeitem][tabindex='0']").focus()
            told = page.inner_text("#tree-readout")
            assert re.search(r"\d+ tokens, \d requests run on it", told)
            assert "sea" not in page.inner_text("#engine")  # hidden by default
            page.keyboard.press("ArrowRight")
            assert page.inner_text("#tree-readout") != told
        page.wait_for_selector("#requests:has-text('Nothing runs')")
        page.wait_for_selector("#step-number:has-text('idle')")
        blocks = "#counters div:has(dt:text-is('Kept for reuse')) dd"
        assert int(page.inner_text(blocks).replace(",", "")) > 0


def test_tiers_are_shown_separately(browser: Any, launch: Callable[..., Server]) -> None:
    server = launch("--host-cache-gb", "0.05")
    with opened(browser, f"{server.url}/") as page:
        live(page)
        page.wait_for_selector("#counters div:has(dt:text-is('Tokens from host memory'))")
        with Load(server, 3):
            page.wait_for_selector("#sources .source.computed[title*=': ']:not([title$=': 0'])")
        told = page.get_attribute("#sources .budget", "aria-label")
        assert re.fullmatch(r"the cache [\d,]+, host memory 0, files 0, computed [\d,]+", told)
        assert page.is_visible("#sources li:has-text('host memory')")


def test_a_hidden_page_sends_no_requests(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/") as page:
        asked: list[str] = []
        over: list[str] = []
        page.on("request", lambda r: asked.append(r.url) if "live" in r.url else None)
        page.on("requestfailed", lambda r: over.append(r.url) if "live" in r.url else None)
        page.wait_for_selector("#model:not(:empty)")
        assert asked == []
        live(page)
        assert len(asked) == 1
        page.click("#live-pause")
        page.wait_for_selector("#live-state[data-state=paused]")
        page.click("#live-pause")
        page.wait_for_selector("#live-state[data-state=live]")
        page.focus("#tab-engine")
        page.keyboard.press("ArrowLeft")
        assert page.is_visible("#input")
        page.wait_for_timeout(300)
        assert (len(asked), len(over)) == (2, 2)


def test_a_lost_server_is_reported_and_retried(browser: Any, launch: Callable[..., Server]) -> None:
    server = launch()
    with opened(browser, f"{server.url}/") as page:
        live(page)
        page.wait_for_selector(".tile:has-text('Running') .value:text-is('0')")
        colour = "() => getComputedStyle(document.querySelector('.tile .value')).color"
        before = page.evaluate(colour)
        server.stop(signal.SIGKILL)
        page.wait_for_selector("#live-state[data-state=disconnected]")
        page.wait_for_function(f"before => ({colour})() !== before", arg=before)
        assert "Next try in" in page.inner_text("#live-why")
        assert page.is_visible("#live-retry")
        page.wait_for_selector("#live-why:has-text('cannot be reached')")


def test_another_engine_is_not_taken_for_the_first(browser: Any, server: Server) -> None:
    """A restarted engine counts from zero: differences to the old engine's counts are not shown."""
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        old = len(asked) == 1
        stats = {"running": 1, "waiting": 0, "blocks_total": [4], "blocks_used": [1]}
        stats |= {"prefix_query_tokens": 10, "prefix_hit_tokens": 5}
        first: dict[str, Any] = {"engine": {"block_size": 16, "budget": 64, "lanes": 4}}
        first |= {"running": [], "waiting": [], "step": None, "prompt_step": None}
        first |= {"firsts": [[90, 0.5]] if old else [[1, 0.02]]}
        events = [
            {"time": at, **first, "stats": stats | {"steps": n, "generation_tokens": n * 10}}
            for at, n in (((100, 900), (101, 910)) if old else ((103, 5), (104, 6)))
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body)

    with opened(browser, f"{server.url}/") as page:
        page.route("**/engine/live*", answer)
        page.click("#tab-engine")
        page.wait_for_selector(".tile:has-text('Generated') .value:text-is('100')")
        assert figure(page, "TTFT") == "500 ms"
        page.wait_for_selector(".tile:has-text('TTFT') .value:text-is('20 ms')")
        assert figure(page, "Generated") == "10"


def test_an_engine_that_is_started_again_is_seen_again(
    browser: Any, launch: Callable[..., Server]
) -> None:
    server = launch("--engine-restarts", "1", "--api-workers", "2")
    with opened(browser, f"{server.url}/") as page:
        live(page)
        with Load(server, 4):
            # The page shows the requests of all processes, whichever one serves it.
            page.wait_for_selector(".tile:has-text('Running') .value:text-is('4')")
        os.kill(child(server, "quire.engine.process.process"), signal.SIGKILL)
        page.wait_for_selector("#live-state[data-state=disconnected]")
        assert "engine" in page.inner_text("#live-why")
        page.wait_for_selector("#live-state[data-state=live]")
        page.wait_for_selector("#tree:has-text('No prefix')")


def test_the_view_asks_for_a_key_and_continues_with_it(
    browser: Any, launch: Callable[..., Server]
) -> None:
    server = launch("--api-key", "right")
    with opened(browser, f"{server.url}/") as page:
        page.click("#tab-engine")
        page.wait_for_selector("#live-state[data-state=locked]")
        page.click("#notice-action")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector("#live-state[data-state=live]")
        assert page.is_hidden("#notice")


def test_an_overloaded_server_says_so(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/") as page:
        body = json.dumps({"error": {"message": "Too many watchers."}})
        page.route("**/engine/live*", lambda route: route.fulfill(status=503, body=body))
        page.click("#tab-engine")
        page.wait_for_selector("#live-state[data-state=overloaded]")
        assert page.inner_text("#live-state") == "Overloaded"
        assert "Too many watchers." in page.inner_text("#live-why")
        assert page.is_visible("#live-retry")


def test_counters_have_words_and_line_up(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/#engine") as page, Load(server, 2):
        page.wait_for_selector("#pools figcaption:has-text('% in use')")
        step = "section:has(h3:text-is('A step, on average'))"
        page.wait_for_selector(f"#counters {step} div:has(dt:text-is('Time')) dd:has-text('ms')")
        for name in page.locator("#counters dt").all_inner_texts():
            assert re.fullmatch(r"[A-Z][A-Za-z',: -]+", name), name
        for group in page.locator("#counters section:visible").all():
            edges = group.locator("dd").evaluate_all(
                "all => all.map(each => Math.round(each.getBoundingClientRect().right))"
            )
            assert len(set(edges)) == 1


def test_requests_columns_have_heads(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/#engine") as page, Load(server, 3):
        page.wait_for_selector("#requests .row >> nth=2")
        heads = page.locator("#requests-head span")
        assert heads.all_inner_texts() == ["", "request", "", "prompt", "generated", "age"]
        cells = page.locator("#requests .row").first.locator("> *")
        right = "e => Math.round(e.getBoundingClientRect().right)"
        for place in (3, 4, 5):
            assert heads.nth(place).evaluate(right) == cells.nth(place).evaluate(right)
        assert int(cells.nth(3).inner_text()) > 0


def test_the_map_fits_the_used_part(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/#engine") as page:
        page.wait_for_selector("#pools figcaption:has-text('A cell is 1 block, 16 tokens.')")
        counts = re.findall(r"([\d,]+) blocks", page.inner_text("#pools figcaption"))
        blocks, behind = (int(count.replace(",", "")) for count in [*counts, "0"][:2])
        page.focus("#pools canvas")
        page.keyboard.press("Home")
        page.keyboard.press("End")
        page.wait_for_selector(f"#pool-readout:has-text('Block {blocks - behind - 1}: ')")


def test_rows_of_the_tree_are_whole(browser: Any, server: Server) -> None:
    branches = [[-1, 0, 0, 0, None], [0, 4000, 0, 0, None]]
    branches += [[len(branches) - 1 + i, 900, 0, 0, None] for i in range(12)]
    branches += [[1, 16, 0, 0, None] for _ in range(40)]
    first = {"time": 1, "engine": {"block_size": 16, "budget": 64, "lanes": 4}}
    first |= {"tree": {"nodes": len(branches), "branches": branches}}
    with opened(browser, f"{server.url}/", width=390) as page:
        body = f"data: {json.dumps(first)}\n\n"
        page.route(
            "**/engine/live*",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        page.click("#tab-engine")
        page.wait_for_selector(".tree [role=treeitem] >> nth=40")
        tree = page.locator("#tree")
        height, width, needed = tree.evaluate("e => [e.clientHeight, e.clientWidth, e.scrollWidth]")
        assert (height % 22, needed) == (0, width)
        edges = page.locator(".tree [role=treeitem]").evaluate_all(
            "all => all.map(each => each.offsetLeft + each.offsetWidth)"
        )
        assert max(edges) <= width


def test_figures_fade_when_they_are_old(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/#engine") as page:
        with Load(server, 1):
            page.wait_for_selector(".tile:not(.old):has-text('ITL') .value:has-text('ms')")
        page.wait_for_selector(".tile.old:has-text('ITL') .value:has-text('ms')")
        assert "old" not in (page.get_attribute(".tile:has-text('Running')", "class") or "")


def test_load_is_bounded_and_can_be_stopped(browser: Any, server: Server) -> None:
    sent: list[dict[str, Any]] = []
    with opened(browser, f"{server.url}/#engine") as page:
        page.on(
            "request",
            lambda r: sent.append(r.post_data_json) if "v1/" in r.url and r.post_data else None,
        )
        page.wait_for_selector("#live-state[data-state=live]")
        page.select_option("#load-count", "16")
        page.click("#load")
        page.wait_for_selector(".row >> nth=5")
        assert re.fullmatch(r"Stop load, \d+ s", page.inner_text("#load"))
        page.click("#load")
        page.wait_for_selector("#load:text-is('Make load')")
        page.wait_for_selector("#requests:has-text('Nothing runs')")
        assert [len(body["prompt"]) for body in sent[:4]] == [4] * 4
        assert {body["max_tokens"] for body in sent} == {128}
        page.click("#load")
        page.wait_for_selector(".row >> nth=1")
        page.click("#tab-chat")
        page.wait_for_selector("#load:text-is('Make load')", state="attached")
        page.click("#tab-engine")
        page.route("**/v1/completions", lambda route: route.fulfill(status=429, body="{}"))
        page.click("#load")
        page.wait_for_selector("#load-said:has-text('The load has ended: ')")


@pytest.mark.parametrize("width", [390, 3840])
def test_the_view_uses_the_width(browser: Any, server: Server, width: int) -> None:
    with opened(browser, f"{server.url}/#engine", width=width, height=width // 2) as page:
        page.wait_for_selector("#counters dd")
        widths = "() => ['html', '#engine'].map(s => document.querySelector(s).scrollWidth)"
        assert page.evaluate(widths) == [width, width]
        panel = page.locator(".panel").first.bounding_box()["width"]
        assert panel > (350 if width == 390 else 1000)
        page.click("#tab-chat")
        assert page.evaluate("() => document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_view_fits_a_phone_in_both_themes(browser: Any, server: Server, scheme: str) -> None:
    options = {"width": 360, "height": 740, "color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, f"{server.url}/#engine", **options) as page, Load(server, 3):
        page.wait_for_selector(".row >> nth=2")
        page.wait_for_selector(".tree [role=treeitem]")
        widths = "() => ['html', '#engine'].map(s => document.querySelector(s).scrollWidth)"
        assert page.evaluate(widths) == [360, 360]
        pixels = page.locator("#pools canvas").first.evaluate(
            "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
        )
        assert pixels > 4  # something is drawn, in more than one colour
