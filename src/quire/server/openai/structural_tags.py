"""Structural tags: text in which tags, once begun, hold documents of their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from quire.errors import RequestError
from quire.grammar.lark import Rules
from quire.server.strict_model import StrictModel

MAX_STRUCTURES = 256
MAX_TRIGGERS = 64

Marker = Annotated[str, Field(max_length=1024)]


class Structure(StrictModel):
    """A tag: what begins it, the schema of what it holds, what ends it."""

    begin: Annotated[str, Field(min_length=1, max_length=1024)]
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: Marker


def structural_grammar(
    structures: Sequence[Structure], triggers: Sequence[str], added: Mapping[str, int]
) -> str:
    """Returns a grammar of any text in which each trigger begins one of the tags.

    Args:
        added: tokens outside the ordinary vocabulary, by their texts.

    Raises:
        RequestError: a tag begins with none of the triggers, or a trigger begins no tag.
    """
    rules = Rules(added)
    rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for place, tag in enumerate(structures):
        trigger = next((each for each in triggers if tag.begin.startswith(each)), None)
        if trigger is None:
            raise RequestError(
                f"'structures[{place}].begin' begins with none of 'triggers'.",
                param=f"structures[{place}].begin",
                code="invalid_value",
            )
        document = rules.schema(tag.json_schema)
        begin, end = rules.literal(tag.begin[len(trigger) :]), rules.literal(tag.end)
        rests[trigger].append(rules.add(f"{begin} {document} {end}"))
    rules.lines.append("TEXT: /(?s:.*)/")
    tags = []
    for place, (trigger, choices) in enumerate(rests.items()):
        if not choices:
            raise RequestError(
                f"'triggers[{place}]' begins none of 'structures'.",
                param=f"triggers[{place}]",
                code="invalid_value",
            )
        begun = f"TEXT {rules.literal(trigger)}"
        if trigger not in added:
            # Lazy: the text ends where the trigger first stands in it.
            rules.lines.append(f"trigger_{place}[lazy]: {begun}")
            begun = f"trigger_{place}"
        tags.append(rules.add(f"{begun} ({' | '.join(choices)})"))
    return rules.grammar(f"({' | '.join(tags)})* tail") + "tail: TEXT\n"
