"""Every template renders as in `transformers`, or is refused if transformers refuses it.

QUIRE_TEST_TEMPLATES names a folder with further templates (*.jinja), such as real models'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.text.chat_template import ChatTemplate

OWN = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
OTHERS = sorted(Path(os.environ.get("QUIRE_TEST_TEMPLATES", "/nowhere")).glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

SYSTEM = {"role": "system", "content": " Be brief. "}
HI = {"role": "user", "content": 'Hi! "Quotes", <tags> & é 漢 😀\n'}
HELLO = {"role": "assistant", "content": " Hello\nthere "}
MORE = {"role": "user", "content": "And now?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <here> & there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where to look."},
                    "days": {"type": "array", "items": {"type": "integer"}, "description": "é"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tells the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def calling(content: str | None, *arguments: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"call{place:05}",
            "type": "function",
            "function": {"name": "weather", "arguments": value},
        }
        for place, value in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(place: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{place:05}", "name": "weather", "content": text}


OSLO = {"city": "Oslo", "days": [1, 2]}
REASONED = {**HELLO, "reasoning_content": "\nThey greet.\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [HI],
    "system": [SYSTEM, HI],
    "turns": [HI, HELLO, MORE],
    "system and turns": [SYSTEM, HI, HELLO, MORE],
    "assistant last": [HI, HELLO],
    "reasoning": [HI, REASONED, MORE, REASONED],
    "thought in the text": [HI, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}],
    "call": [HI, calling("", OSLO)],
    "call without content": [HI, calling(None, OSLO)],
    "call as text": [HI, calling("", '{"city": "Oslo"}')],
    "result": [SYSTEM, HI, calling("", OSLO), result(0, '{"sky": "grey"}')],
    "result as text": [HI, calling(None, '{"city": "Oslo"}'), result(0, "grey"), HELLO, MORE],
    "two results": [
        HI,
        calling("I look.", OSLO, {"city": "Rome"}),
        result(0, "grey"),
        result(1, "blue"),
        HELLO,
        MORE,
    ],
    "wrong order": [HELLO, HELLO],
    "unknown role": [HI, {"role": "critic", "content": "Boo."}],
    "nothing": [],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "enable_thinking": False, "reasoning_effort": "high"},
    {"documents": [{"title": "One", "text": "a\nb"}, {"text": ""}, {"text": "c"}]},
]


def expected(source: str, messages: Any, **variables: Any) -> str | None:
    """Returns transformers' rendering, or None if it refuses."""
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        rendered = transformers.render_jinja_template(
            [messages], chat_template=source, **SPECIAL, **variables
        )
    except Exception:
        return None
    text: str = rendered[0][0]
    return text


@pytest.mark.parametrize("path", OWN + OTHERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equal_to_transformers(path: Path, name: str) -> None:
    source = path.read_text("utf-8")
    template = ChatTemplate(source)
    for variables in VARIABLES:
        for add in (True, False):
            want = expected(source, CONVERSATIONS[name], add_generation_prompt=add, **variables)
            try:
                text = template.render(
                    CONVERSATIONS[name], add_generation_prompt=add, **SPECIAL, **variables
                )
            except RequestError:
                text = None
            assert text == want, (variables, add)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_own_templates_say_something(path: Path) -> None:
    source = path.read_text("utf-8")
    for name in ("plain", "system and turns", "two results"):
        messages = CONVERSATIONS[name]
        text = ChatTemplate(source).render(messages, add_generation_prompt=True, **SPECIAL)
        assert messages[0]["content"].strip() in text
