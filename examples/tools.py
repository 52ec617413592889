"""Calls a tool from a chat with a running server (`make serve`), with the `openai` client.

The embedded model is too small to think of calling anything, so it is made to: its arguments fit
the schema, but make little sense. With a larger model leave `tool_choice` out.
"""

import json
import sys
from typing import Any

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id


def weather(city: str, days: int = 1) -> str:
    return f"Rain in {city}, for {days} days."


tools: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
messages: list[Any] = [{"role": "user", "content": "Do I need an umbrella in Oslo?"}]
answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
)
message = answer.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or ():
    result = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=60)
print(answer.choices[0].message.content)
