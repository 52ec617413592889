"""Structural tags: any text is allowed until a trigger, then the tag's grammar applies."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.apis.openai.structured import Structure, structural_grammar
from quire.text.tokenizer import Tokenizer
from tests.features.structured_output.conftest import EOS, Accepts

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def tag(begin: str, schema: Any = AGE, end: str = "</f>") -> Structure:
    return Structure.model_validate({"begin": begin, "schema": schema, "end": end})


TAGS = [tag("<f=cat>"), tag("<f=dog>", {"type": "null"}), tag("[list]", {"type": "null"}, "")]


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("", True),
        ("Just a text.\nAnd more < of = it.", True),
        ('A cat: <f=cat>{"age": 3}</f>', True),
        ('<f=cat>{"age": 3}</f> and <f=dog>null</f>, and [list]null and so on', True),
        ("<f=fox>", False),
        ("<f=cat>no", False),
        ('<f=cat>{"age": "x"}</f>', False),
        ('<f=cat>{"age": 3}</g>', False),
        ('<f=cat>{"age": 3}', False),
        ("A list: [list]nothing", False),
    ],
)
def test_texts(accepts: Accepts, text: str, accepted: bool) -> None:
    grammar = structural_grammar(TAGS, ["<f=", "[list]"], {})
    assert accepts(StructuredOutputsParams(grammar=grammar), text) is accepted


def test_triggers_may_be_special_tokens(accepts: Accepts, tokenizer: Tokenizer) -> None:
    name, id = next((name, id) for name, id in tokenizer.added_tokens.items() if id not in EOS)
    grammar = structural_grammar([tag(f"{name}cat:", end="")], [name], tokenizer.added_tokens)
    assert f"<[{id}]>" in grammar
    params = StructuredOutputsParams(grammar=grammar)
    assert accepts(params, f'text {name}cat:{{"age": 3}} text')
    assert not accepts(params, f"text {name}dog")


def test_tags_without_triggers_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        structural_grammar(TAGS, ["<f="], {})
    assert caught.value.param == "structures[2].begin"
    with pytest.raises(RequestError) as caught:
        structural_grammar(TAGS[:1], ["<f=", "["], {})
    assert caught.value.param == "triggers[1]"
