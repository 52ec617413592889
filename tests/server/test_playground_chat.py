"""The chat of the page, in a real browser on a real server."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.chromium import launched, opened, say
from tests.server.server_process import MODEL, Server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser, f"{server.url}/") as opened_page:
        yield opened_page


def test_a_conversation_streams(page: Any) -> None:
    page.wait_for_selector(f"#model:has-text('{MODEL}')")
    page.fill("#param-max_tokens", "60")
    page.fill("#param-temperature", "0")
    page.click(".starters button:first-child")
    page.wait_for_selector(".answer.running .answer-text:not(:empty)")
    assert page.inner_text("#send") == "Stop"
    page.wait_for_selector(".answer[aria-busy=false]")
    assert len(page.inner_text(".answer-text")) > 40
    facts = page.inner_text(".facts")
    assert "60 tokens" in facts
    assert re.search(r"prompt, \d+ cached", facts)
    assert "to first" in facts
    assert "tok/s" in facts
    assert "cut off" in facts
    say(page, "And then?")
    assert page.locator(".turn").count() == 2
    cached = re.search(r"(\d+) cached", page.locator(".facts").last.inner_text())
    assert cached is not None
    assert int(cached[1]) > 0


def test_parameters_are_sent_and_kept(page: Any) -> None:
    page.fill("#param-system", "Be brief.")
    for name, value in {"temperature": "0.5", "top_k": "5", "seed": "9", "max_tokens": "4"}.items():
        page.fill(f"#param-{name}", value)
    page.fill("#param-stop", "zzz\n\\n\\n")
    page.fill("#param-extra", '{"repetition_penalty": 1.1}')
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Hello")
    body = json.loads(sent.value.post_data)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["stop"] == ["zzz", "\n\n"]
    shown = {key: body[key] for key in ("temperature", "top_k", "seed", "repetition_penalty")}
    assert shown == {"temperature": 0.5, "top_k": 5, "seed": 9, "repetition_penalty": 1.1}
    assert "top_p" not in body
    page.reload()
    assert page.input_value("#param-seed") == "9"
    page.click("#reset-params")
    assert page.input_value("#param-seed") == ""


def test_answers_follow_a_schema(page: Any) -> None:
    page.select_option("#param-format", "json_schema")
    page.fill("#param-schema", '{"enum": ["red", "green"]}')
    say(page, "A colour?")
    assert page.inner_text(".answer-text") in ('"red"', '"green"')


def test_tokens_are_coloured_and_tell_their_alternatives(page: Any) -> None:
    page.check("#colour")
    page.fill("#param-max_tokens", "40")
    page.fill("#param-seed", "1")
    say(page, "Tell me a story about a fox.")
    tokens = page.locator(".token")
    assert tokens.count() > 20
    assert "".join(tokens.all_inner_texts()).strip() == page.inner_text(".answer-text").strip()
    unlikely = page.locator(".token.p2, .token.p3, .token.p4").first
    assert unlikely.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    unlikely.hover()
    assert page.is_visible("#token-card")
    assert page.locator("#token-card tr:not(:has(.bar-cell))").count() >= 5
    page.focus(".tokens")
    page.keyboard.press("Home")
    assert "current" in (tokens.first.get_attribute("class") or "")
    assert "%" in page.inner_text("#announcer")
    page.keyboard.press("ArrowRight")
    assert "current" in (tokens.nth(1).get_attribute("class") or "")
    page.keyboard.press("Escape")
    assert page.is_hidden("#token-card")
    page.uncheck("#colour")
    background = unlikely.evaluate("e => getComputedStyle(e).backgroundColor")
    assert background == "rgba(0, 0, 0, 0)"


def test_two_sides_are_compared(page: Any) -> None:
    page.fill("#param-max_tokens", "12")
    page.fill("#param-seed", "1")
    page.check("#compare")
    page.click("#sides label:nth-child(2)")
    assert page.input_value("#param-max_tokens") == "12"
    page.fill("#param-max_tokens", "6")
    say(page, "Tell me a story about a boat.")
    page.wait_for_selector(".answer[data-side=b][aria-busy=false]")
    assert "12 tokens" in page.inner_text(".answer[data-side=a] .facts")
    assert "6 tokens" in page.inner_text(".answer[data-side=b] .facts")
    assert page.inner_text(".answer[data-side=b] .what") == "max_tokens 6"
    one, two = page.locator(".answer").all()
    assert one.bounding_box()["y"] == two.bounding_box()["y"]
    answers = [each.locator(".answer-text").inner_text() for each in (one, two)]
    assert answers[0].startswith(answers[1])
    page.uncheck("#compare")
    say(page, "And then?")
    assert page.locator(".turn:last-child .answer").count() == 1
    assert page.locator(".turn").first.locator(".answer").count() == 2


def test_enter_sends_and_shift_breaks_the_line(page: Any) -> None:
    page.fill("#param-max_tokens", "3")
    page.fill("#input", "One")
    page.press("#input", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#input") == "One\ntwo"
    assert page.locator(".turn").count() == 0
    page.press("#input", "Enter")
    page.wait_for_selector(".turn .answer[aria-busy=false] .actions button")
    assert page.inner_text(".asked").startswith("One\ntwo")


def test_empty_fields_show_their_defaults(page: Any) -> None:
    page.wait_for_selector("#model:not(:empty)")
    ask = "async () => (await (await fetch('v1/models')).json()).data[0].sampling_defaults"
    expected = {"top_p": "1", "seed": "none", "min_tokens": "0"}
    expected |= {name: str(value) for name, value in page.evaluate(ask).items()}
    for name, value in expected.items():
        assert page.get_attribute(f"#param-{name}", "placeholder") == value


def test_no_default_is_clipped(page: Any) -> None:
    """The text of an empty field fits, also where the model gives the default."""
    page.wait_for_selector("#model:not(:empty)")
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll("#params-form input")].filter((input) => {
            const context = document.createElement("canvas").getContext("2d");
            const style = getComputedStyle(input);
            context.font = style.font;
            const room = input.clientWidth - parseFloat(style.paddingLeft) * 2;
            return context.measureText(input.placeholder).width > room;
        }).map((input) => input.name)"""
    )
    assert too_wide == []


def png(width: int, height: int) -> bytes:
    """Returns an image of one colour."""
    rows = (b"\0" + b"\x20\x80\xc0" * width) * height
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


PNG = png(400, 200)


def with_images(page: Any, **limits: int) -> None:
    """Lets the page believe that the model sees images."""
    images = {"max_images": 2, "max_bytes": 1000, "max_pixels": 100_000, **limits}

    def answer(route: Any) -> None:
        found = route.fetch().json()
        found["data"][0]["images"] = images
        route.fulfill(json=found)

    page.route("**/v1/models", answer)
    page.reload()


def test_images_go_with_a_question(page: Any) -> None:
    page.wait_for_selector("#model:not(:empty)")
    assert page.is_hidden("#attach")
    with_images(page)
    page.wait_for_selector("#attach:visible")
    assert "2 images of at most 1.0 kB" in page.get_attribute("#attach", "title")
    file = {"name": "dot.png", "mimeType": "image/png", "buffer": PNG}
    page.set_input_files("#attach-files", [file])
    page.wait_for_selector("#attachments canvas[aria-label='dot.png']")
    for kind in ("paste", "drop"):
        page.evaluate(
            """([kind, bytes]) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], kind, {type: "image/png"}));
                const given = {bubbles: true, cancelable: true};
                const event = kind === "paste"
                    ? new ClipboardEvent(kind, {...given, clipboardData: data})
                    : new DragEvent(kind, {...given, dataTransfer: data});
                document.getElementById("input").dispatchEvent(event);
            }""",
            [kind, list(PNG)],
        )
        if kind == "paste":
            page.wait_for_selector("#attachments canvas[aria-label=paste]")
    page.wait_for_selector("#attach-error:has-text('may have 2 images')")
    page.click("[aria-label='Remove paste']")
    answer_with(page, delta(content="A dot."))
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "What is it?")
    image, text = json.loads(sent.value.post_data)["messages"][0]["content"]
    assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert text == {"type": "text", "text": "What is it?"}
    assert page.locator(".asked canvas").count() == 1
    assert page.is_hidden("#attachments")
    page.hover(".asked")
    page.click("text=Edit")
    assert page.locator("#attachments canvas").count() == 1


@pytest.mark.parametrize(
    ("limits", "name", "data", "why"),
    [
        ({"max_bytes": 10}, "a.png", PNG, "this server takes 10 bytes"),
        ({"max_pixels": 1}, "a.png", PNG, "a.png has 0.1 megapixels"),
        ({}, "a.png", b"no image", "a.png cannot be read as an image"),
        ({}, "a.pdf", PNG, "a.pdf is no PNG, JPEG, WebP, GIF or BMP image"),
    ],
    ids=["bytes", "pixels", "damaged", "kind"],
)
def test_images_that_the_server_would_refuse(
    page: Any, limits: dict[str, int], name: str, data: bytes, why: str
) -> None:
    with_images(page, **limits)
    page.wait_for_selector("#attach:visible")
    kind = "image/png" if name.endswith("png") else "application/pdf"
    page.set_input_files("#attach-files", [{"name": name, "mimeType": kind, "buffer": data}])
    page.wait_for_selector(f"#attach-error:has-text('{why}')")
    assert page.is_hidden("#attachments")


def test_stop_and_regenerate(page: Any) -> None:
    page.fill("#param-extra", '{"ignore_eos": true}')
    page.fill("#input", "Tell me a very long story.")
    page.press("#input", "Control+Enter")
    page.wait_for_selector(".answer.running .answer-text:not(:empty)")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer[aria-busy=false] .actions button")
    assert "stopped" in page.inner_text(".facts")
    assert page.inner_text("#send") == "Send"
    kept = page.inner_text(".answer-text")
    assert kept
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("text=Continue")
        page.wait_for_selector(".answer.running")
    body = json.loads(sent.value.post_data)
    assert body["continue_final_message"] is True
    assert body["messages"][-1]["role"] == "assistant"
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer[aria-busy=false] .actions button")
    assert page.inner_text(".answer-text").startswith(kept[:-8])
    page.fill("#param-extra", "")
    page.fill("#param-max_tokens", "3")
    page.click("text=Regenerate")
    page.wait_for_selector(".facts:has-text('3 tokens')")
    assert page.locator(".turn").count() == 1
    page.hover(".asked")
    page.click("text=Edit")
    assert page.input_value("#input") == "Tell me a very long story."
    assert page.locator(".turn").count() == 0


def test_mistakes_are_shown_where_they_are(page: Any) -> None:
    page.fill("#param-extra", '{"foo": ')
    page.fill("#input", "Hello")
    page.press("#input", "Control+Enter")
    assert "Further fields" in page.inner_text(".why:visible")
    assert page.locator(".turn").count() == 0
    page.fill("#param-extra", '{"foo": 1}')
    say(page, "Hello")
    assert "foo" in page.inner_text(".answer-error")


def scripted(*chunks: dict[str, Any]) -> str:
    """Answers with a stream of these chunks."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def answer_with(page: Any, *chunks: dict[str, Any]) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=scripted(*chunks)),
    )


def test_reasoning_is_folded_away(page: Any) -> None:
    details = {"reasoning_tokens": 3}
    answer_with(
        page,
        delta(reasoning_content="First I th"),
        delta(reasoning_content="ink."),
        delta(content="Done."),
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 1,
                "completion_tokens": 5,
                "completion_tokens_details": details,
            },
        },
    )
    say(page, "Think")
    assert page.inner_text(".answer-text") == "Done."
    assert page.inner_text(".reasoning summary") == "Reasoning, 3 tokens"
    assert page.is_hidden(".reasoning div")
    page.focus(".reasoning summary")
    page.keyboard.press("Enter")
    assert page.inner_text(".reasoning div") == "First I think."
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Again")
    said = json.loads(sent.value.post_data)["messages"][1]
    assert said == {
        "role": "assistant",
        "content": "Done.",
        "reasoning_content": "First I think.",
    }


def test_calls_of_tools_are_shown(page: Any) -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add"}}
    rest = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    answer_with(page, delta(tool_calls=[first]), delta(tool_calls=[rest]))
    say(page, "Add")
    assert page.inner_text(".calls") == 'add({"a": 1})'


def test_an_error_in_mid_stream_keeps_received_text(page: Any) -> None:
    error = {"error": {"message": "The engine has stopped.", "type": "x"}}
    answer_with(page, delta(content="Once upon"), error)
    say(page, "Story")
    assert page.inner_text(".answer-text") == "Once upon"
    assert page.inner_text(".answer-error") == "The engine has stopped."


def test_text_of_a_model_is_only_text(page: Any) -> None:
    answer_with(page, delta(content="<img src=x onerror=alert(1)><b>bold</b>"))
    say(page, "<script>alert(1)</script>")
    assert page.inner_text(".answer-text").startswith("<img")
    assert page.locator(".turn img, .turn b >> text=bold, .turn script").count() == 0


MARKDOWN = """## Plan

A **bold** word, `x < y`, &lt;b&gt; and [a link](https://example.com/a).

1. one
   - [x] inner
2. two

| name | rate |
| :-- | --: |
| tiny | 12 |

```python
def f(x):
    return "text"  # why
```
"""


def test_markdown_is_formatted(page: Any) -> None:
    cut = [delta(content=MARKDOWN[i : i + 9]) for i in range(0, len(MARKDOWN), 9)]
    answer_with(page, *cut)
    say(page, "Format")
    page.wait_for_selector(".hl-keyword:text-is('def')")
    answer = page.locator(".formatted")
    assert answer.locator("h2").inner_text() == "Plan"
    assert answer.locator("p").first.inner_text() == "A bold word, x < y, <b> and a link."
    assert answer.locator("p a").get_attribute("rel") == "noopener noreferrer"
    assert answer.locator("ol > li ul > li input[disabled]").is_checked()
    assert answer.locator("td").all_inner_texts() == ["tiny", "12"]
    align = "e => getComputedStyle(e).textAlign"
    assert [each.evaluate(align) for each in answer.locator("td").all()] == ["left", "right"]
    assert answer.locator("pre").inner_text() == 'def f(x):\n    return "text"  # why'
    assert answer.locator(".hl-string, .hl-comment").count() == 2
    colours = "e => getComputedStyle(e).color"
    assert answer.locator(".hl-keyword").first.evaluate(colours) != answer.evaluate(colours)
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Again")
    assert json.loads(sent.value.post_data)["messages"][1]["content"] == MARKDOWN


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2">

<iframe srcdoc="<script>parent.hit = 3</script>"></iframe> <svg onload="window.hit = 4">

[click](javascript:window.hit=5) [click](JaVaScRiPt&#58;window.hit=6) <javascript:window.hit=7>
[click](data:text/html,<script>opener.hit=8</script>) [ref] ![x](https://evil.invalid/pixel.png)
[click](\tjavascript:window.hit=9) [vb](vbscript:x) &toString; **<b onclick="window.hit=10">b</b>**

[ref]: javascript:window.hit=11

| <img src=x onerror=window.hit=12> | a |
| --- | --- |
| <style>body { display: none }</style> | <form action=//evil.invalid><button>b |

```html"onmouseover="window.hit=13
x
```

```html
<script>window.hit = 14</script>
```

```__proto__
x
```
"""


def test_hostile_markdown_runs_nothing(page: Any) -> None:
    answer_with(page, delta(content=HOSTILE + "> " * 20_000))
    say(page, "Attack")
    answer_with(page, delta(content=HOSTILE))
    say(page, "Attack")
    answer = page.locator(".formatted").last
    page.wait_for_selector(".formatted .hl-tag >> nth=-1")
    made = set(answer.evaluate("e => [...e.querySelectorAll('*')].map(x => x.localName)"))
    harmless = {"p", "div", "span", "br", "strong", "a", "pre", "code", "button"}
    assert made <= harmless | {"table", "thead", "tbody", "tr", "th", "td"}
    for link in answer.locator("a").all():
        assert (link.get_attribute("href") or "").startswith("https://")
    names = answer.evaluate("e => [...e.querySelectorAll('*')].flatMap(x => x.getAttributeNames())")
    assert set(names) <= {
        "class", "href", "target", "rel", "title", "type", "tabindex", "role", "aria-label",
    }  # fmt: skip
    for element in answer.locator("p, td, th, strong").all():
        element.click()
    assert page.evaluate("() => window.hit") is None
    assert page.is_visible("body")
    assert "&toString;" in answer.inner_text()


def test_a_text_that_is_slow_to_parse_stays_as_it_is(page: Any) -> None:
    page.evaluate("() => { let now = 0; performance.now = () => (now += 5000); }")
    answer_with(page, delta(content="**a** "), delta(content="**b**"))
    say(page, "Slow")
    assert page.inner_text(".formatted .plain") == "**a** **b**"


def test_export(page: Any) -> None:
    page.fill("#param-max_tokens", "5")
    say(page, 'It\'s "you"')
    page.click("#export")
    exported = json.loads(page.inner_text("#export-text"))
    assert exported["messages"][0] == {"role": "user", "content": 'It\'s "you"'}
    assert exported["turns"][0]["answers"][0]["usage"]["completion_tokens"] == 5
    page.click("#export-kinds label:nth-child(2)")
    command = page.inner_text("#export-text")
    assert command.startswith("curl -N ")
    assert r"It'\''s" in command


def test_a_wrong_key_is_reported_and_a_right_one_is_kept(
    browser: Any, launch: Callable[..., Server]
) -> None:
    server = launch("--api-key", "right")
    with opened(browser, f"{server.url}/") as page:
        page.wait_for_selector("#notice:has-text('wants an API key')")
        page.click("#notice-action")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#notice:has-text('does not accept')")
        say(page, "Hello")
        assert "does not accept" in page.inner_text(".answer-error")
        page.click("#open-key")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#model:has-text('{MODEL}')")
        page.fill("#param-max_tokens", "5")
        say(page, "Hello")
        assert "5 tokens" in page.locator(".facts").last.inner_text()
        kept = page.evaluate("() => [Object.values(sessionStorage), Object.values(localStorage)]")
        assert kept[0] == ["right"]
        assert not any("right" in value for value in kept[1])
        page.click("#open-key")
        page.click("#key-forget")
        page.wait_for_selector("#notice:has-text('wants an API key')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(browser: Any, server: Server, scheme: str) -> None:
    def brightness() -> float:
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))

    with opened(browser, f"{server.url}/", color_scheme=scheme) as page:
        assert (brightness() > 400) == (scheme == "light")
        page.click("#theme")  # light, whatever the system has
        assert brightness() > 400
        page.click("#theme")
        assert brightness() < 200
        page.reload()
        assert brightness() < 200


def test_the_page_fits_a_phone(browser: Any, server: Server) -> None:
    with opened(browser, f"{server.url}/", width=360, height=740, has_touch=True) as page:
        page.fill("#input", "word" * 200)
        for tab in ("#tab-engine", "#tab-chat"):
            page.click(tab)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        page.click("#open-params")
        assert page.is_visible("#param-temperature")
        page.fill("#param-max_tokens", "8")
        page.click("#close-params")
        page.check("#compare")
        say(page, "word" * 100)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        assert page.evaluate("() => document.getElementById('turns').scrollWidth") <= 360
        below = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
        page.click("#open-params")
        page.fill("#param-max_tokens", "150")
        page.click("#close-params")
        say(page, "Tell me a long story.")
        assert page.locator("#turns").evaluate(below) < 2  # the end stays in sight
