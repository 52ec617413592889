"""Finds out how a chat template handles tools and tool calls, by rendering small conversations.

Templates differ, and there is no standard. Some need arguments as an object, others as text. Some
need no content next to calls, others an empty one. Some need a description of each tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.chat_template import UNSAFE, ChatTemplate, TemplateTraits

PROBED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probed_key": {"type": "string", "description": "A key."}},
            "required": ["probed_key"],
        },
    },
}
_UNDESCRIBED = {
    "type": "function",
    "function": {
        name: value for name, value in PROBED_TOOL["function"].items() if name != "description"
    },
}
PROBED_CALL = {"probed_key": "probed_value"}
"""Arguments of the call to `PROBED_TOOL` in the probing conversations."""
_ID = "probe1234"  # Mistral's templates accept only ids of this length.
_TEXT = '{"probed_key": "probed_value"}'


def probe(template: ChatTemplate, special_tokens: Mapping[str, str]) -> TemplateTraits:
    """Renders a few small conversations, and returns the traits that the results show."""
    errors: list[str] = []

    def rendered(
        messages: Sequence[Mapping[str, Any]],
        tool: Mapping[str, Any] = PROBED_TOOL,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return template.render(
                messages,
                tools=[tool],
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        except RequestError as error:
            if error.code == UNSAFE:
                errors.append(str(error))
            return ""

    hello = [{"role": "user", "content": "Hello."}]
    shows_tools = "probed_tool" in rendered(hello)
    late_system = _shows_late_system(template, special_tokens)
    needs_description = shows_tools and "probed_tool" not in rendered(hello, _UNDESCRIBED)
    for empty_content in ("", None):
        for as_text in (False, True):
            conversation = _conversation(_TEXT if as_text else PROBED_CALL, empty_content)
            text = rendered(conversation)
            # Escaped quotes mean that the template encoded the text a second time.
            if "probed_value" in text and 'probed_key\\"' not in text:
                before = rendered(hello, add_generation_prompt=True)
                shown = rendered(conversation[:2])
                call = _behind(before, shown, rendered(hello))
                ids_name_tools = "probed_tool" not in call and _ID in call
                if ids_name_tools:
                    call = call.replace(_ID, named_id("probed_tool", 0))
                return TemplateTraits(
                    shows_tools, True, needs_description, as_text, empty_content, call,
                    ids_name_tools, None, late_system,
                )  # fmt: skip
    return TemplateTraits(
        shows_tools,
        False,
        needs_description,
        error=errors[0] if errors else None,
        late_system=late_system,
    )


def _shows_late_system(template: ChatTemplate, special_tokens: Mapping[str, str]) -> bool:
    """Returns whether a system message that follows others is written to the prompt."""
    user = {"role": "user", "content": "Hello."}
    system = {"role": "system", "content": "probed_system"}

    def shown(*messages: Mapping[str, Any]) -> bool:
        try:
            return "probed_system" in template.render(messages, **special_tokens)
        except RequestError:
            return False

    return shown(user, system) or not shown(system, user)


def named_id(name: str, number: int) -> str:
    """Returns a call's id with its tool's name, in the form of Kimi K2.

    Args:
        name: name of the tool.
        number: number of the call in the conversation.
    """
    return f"functions.{name}:{number}"


def _behind(before: str, text: str, other: str) -> str:
    """Returns the part of `text` that shows the call.

    Args:
        before: the prompt. The common beginning of both is removed, up to a mark.
        other: the text without the call. The common end of both is removed, starting at a mark,
            because some templates close every conversation with instructions.
    """
    pairs = enumerate(zip(reversed(text), reversed(other), strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    cut = text.find("<", len(text) - shared)
    text = text[:cut] if cut >= 0 else text
    pairs = enumerate(zip(before, text, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(before), len(text)))
    mark = text.rfind("<", 0, end)
    return text[mark if mark >= 0 and ">" not in text[mark:end] else end :]


def _conversation(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {
        "id": _ID,
        "type": "function",
        "function": {"name": "probed_tool", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": "probed_tool", "content": "done"},
    ]
