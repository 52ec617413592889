"""Schemas of `structured.py`: new ones by number, and one agent's tools.

Every schema is an array that never ends by itself, so that all texts have the length asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

ENDLESS = 100_000
"""Items that an array must have."""


def endless(item: Json, **rest: Any) -> Json:
    return {**rest, "type": "array", "items": item, "minItems": ENDLESS}


def closed(properties: Json) -> Json:
    """Returns an object that has these properties, all of them, and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def records(salt: int) -> Json:
    """Returns flat records with an optional owner: integers, formats, a short list."""
    owner = closed({"email": {"type": "string", "format": "email"}, "admin": {"type": "boolean"}})
    record = closed(
        {
            f"id_{salt}": {"type": "integer", "minimum": 0, "maximum": 10_000 + salt},
            "name": {"type": "string", "maxLength": 8 + salt % 24},
            f"state_{salt % 7}": {"enum": [f"on_{salt}", f"off_{salt}", "unknown"]},
            "when": {"type": "string", "format": "date-time"},
            "code": {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{3,{4 + salt % 5}}}$"},
            "score": {"type": "number", "minimum": 0, "maximum": 1 + salt},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 4},
            "owner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/owner"}]},
        }
    )
    return endless(record, **{"$defs": {"owner": owner}})


def tickets(salt: int) -> Json:
    """Returns nested objects: bounded strings of many lengths, enums, patterns, lists of enums."""
    address = closed(
        {
            "street": {"type": "string", "minLength": 1, "maxLength": 40 + salt % 40},
            "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
            "country": {"enum": ["AT", "CH", "DE", "FR", "IT", f"X{salt}"]},
        }
    )
    person = closed(
        {
            "name": {"type": "string", "minLength": 2, "maxLength": 30 + salt % 30},
            "phone": {"type": "string", "pattern": f"^\\+[0-9]{{6,{12 + salt % 3}}}$"},
            "address": address,
        }
    )
    ticket = closed(
        {
            "ticket": {"type": "string", "pattern": f"^[A-Z]{{3}}-[0-9]{{4,{5 + salt % 4}}}$"},
            "priority": {"enum": ["low", "normal", "high", f"p{salt}"]},
            f"title_{salt}": {"type": "string", "minLength": 1, "maxLength": 40 + salt % 60},
            "summary": {"type": "string", "maxLength": 120 + salt % 200},
            "reporter": person,
            "labels": {
                "type": "array",
                "items": {"enum": ["bug", "feature", "question", f"label_{salt}"]},
                "maxItems": 5,
            },
            "amount": {"type": "number", "minimum": 0, "maximum": 100_000 + salt},
            "due": {"type": "string", "format": "date"},
            "link": {
                "type": "string",
                "pattern": "^https://[a-z0-9.-]{3,40}/[A-Za-z0-9_/-]{0,60}$",
            },
        }
    )
    return endless(ticket)


NEW: dict[str, Callable[[int], Json]] = {"tickets": tickets, "records": records}
"""Loads of schemas that are new for every number."""


def agent_tools() -> Json:
    """Returns calls of a coding agent's tools, which it sends with every request."""
    path = {"type": "string", "minLength": 1, "maxLength": 200}
    text = {"type": "string", "maxLength": 2000}
    line = {"type": "integer", "minimum": 1, "maximum": 1_000_000}
    tools: dict[str, Json] = {
        "read_file": {"path": path, "first_line": line, "last_line": line},
        "write_file": {"path": path, "content": text},
        "replace": {"path": path, "old": text, "new": text, "all": {"type": "boolean"}},
        "search": {
            "pattern": {"type": "string", "maxLength": 200},
            "folder": path,
            "kind": {"enum": ["text", "regex", "symbol"]},
            "most": {"type": "integer", "minimum": 1, "maximum": 500},
        },
        "run": {
            "command": {"type": "string", "maxLength": 500},
            "timeout_s": {"type": "number", "minimum": 0, "maximum": 600},
            "background": {"type": "boolean"},
        },
        "fetch": {
            "url": {"type": "string", "pattern": "^https?://[A-Za-z0-9./_-]{3,200}$"},
            "method": {"enum": ["GET", "HEAD", "POST"]},
        },
        "plan": {
            "steps": {
                "type": "array",
                "items": closed(
                    {
                        "title": {"type": "string", "maxLength": 80},
                        "state": {"enum": ["open", "active", "done"]},
                    }
                ),
                "maxItems": 8,
            }
        },
        "ask": {"question": {"type": "string", "maxLength": 400}},
    }
    calls = [
        closed({"name": {"const": name}, "arguments": closed(arguments)})
        for name, arguments in tools.items()
    ]
    return endless({"anyOf": calls})
