"""Calls a tool from a chat with a running server (`make serve`), with the `openai` client.

The embedded model tells stories and is too small to think of calling anything. `tool_choice` makes
it call the tool, the schema makes the arguments valid, and a story is what it is then asked for.
With a larger model leave `tool_choice` out.
"""

import json
import sys
from typing import Any

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id


def hero(kind: str, color: str) -> str:
    return f"a {color} {kind}"


tools: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "hero",
            "description": "Chooses whom the story is about.",
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": ["fox", "dog", "cat"]},
                    "color": {"type": "string", "enum": ["red", "brown", "white"]},
                },
                "required": ["kind", "color"],
                "additionalProperties": False,
            },
        },
    }
]
messages: list[Any] = [{"role": "user", "content": "Choose an animal for a story."}]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
)
message = answer.choices[0].message
messages.append(message.model_dump(exclude_none=True))
result = ""
for call in message.tool_calls or ():
    result = hero(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}\n")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
messages.append({"role": "user", "content": f"Tell me a story about {result}."})
answer = client.chat.completions.create(
    model=model, messages=messages, max_tokens=200, temperature=0
)
print(answer.choices[0].message.content)
