"""Masks built from tables equal llguidance's, bit for bit, at any position of random documents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.numpy import fill_next_token_bitmask

from quire.arrays import Int32
from quire.features.structured_output.compiler import Compiler, CompilerConfig
from quire.features.structured_output.mask_memory import MaskMemory
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.features.structured_output.pattern_tails import pattern_tail
from quire.features.structured_output.string_walk import UNBOUNDED, StringWalk, string_places
from quire.grammar.patterns import translate
from quire.sampling_params import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from tests.features.structured_output.conftest import EOS

_WORDS = ("a", 'a"b', "é", "name", "\\", "日本")


@pytest.fixture(scope="module")
def walking(tokenizer: Tokenizer) -> Iterator[Compiler]:
    config = CompilerConfig(threads=1, walks=True)
    made = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS, config)
    made.warm_up()
    assert made._tables is not None
    assert made._tables.result().usable
    yield made
    made.shutdown()


class Walk:
    """A random request: checks its masks against llguidance's, and samples any allowed token."""

    def __init__(self, compiler: Compiler, schema: Any, seed: int) -> None:
        self._compiler = compiler
        self._random = random.Random(seed)
        asked = StructuredOutputsParams(json=json.dumps(schema))
        grammar = compiler.compile(asked).result()
        self.state = GrammarState(position=0)
        self.state.begin(grammar, compiler.walk(asked, repeated=True))
        self.copy = grammar.deep_copy()
        self._builder = MaskBuilder(compiler.vocab_size)
        self._words = -(-compiler.vocab_size // 32)
        self.put_together = 0

    def run(self, tokens: int) -> int:
        """Runs the request; returns the number of masks built from tables."""
        for _ in range(tokens):
            mask = self._mask()
            allowed = _tokens_of(mask)
            rest = [token for token in allowed if token not in EOS]
            if not rest:
                break
            # Single bytes and short texts lead through more places than words do.
            token = self._random.choice(rest if self._random.random() < 0.5 else rest[:200])
            self.state.advance([token])
            self.copy.consume_token(token)
        return self.put_together

    def write(self, tokenizer: Tokenizer, text: str) -> None:
        """Writes a text in its canonical tokens."""
        for token in tokenizer.encode(text, add_special_tokens=False).tolist():
            assert token in _tokens_of(self._mask(may_draft=False))
            self.state.advance([token])
            self.copy.consume_token(token)

    def _mask(self, may_draft: bool = True) -> Int32:
        strings = self.state.strings
        wanted = np.zeros((1, self._words), dtype=np.int32)
        fill_next_token_bitmask(self.copy, wanted)
        lines = 1
        drafts: list[int] = []
        if may_draft and self._random.random() < 0.1:  # a row that verifies a draft
            lines, drafts = 2, [self._random.choice(_tokens_of(wanted[0]))]
        row = MaskRow(self.state, lines, drafts)
        masks = np.full((lines, self._words), 7, dtype=np.int32)
        self._builder.build([row], masks, self._compiler.tokenizer_vocab)
        if strings is not None and strings.short and not drafts:
            self.put_together += strings.base is not None
        if self._random.random() < 0.7:
            self.state.settle()
        assert self.state.error is None
        assert (masks[0] == wanted[0]).all()
        return masks[0]


def _tokens_of(mask: Int32) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


strings = st.one_of(
    st.builds(
        lambda most: {"type": "string", "maxLength": most},
        st.integers(0, 80) | st.integers(100, 900),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "string", "pattern": "^[ab]{2,5}$", "maxLength": 4},
            {"type": "string", "format": "email"},
            {"type": ["string", "null"], "maxLength": 3},
            {"enum": ["a", "ab", 'x"y', 5, None]},
            {"const": "é"},
        ]
    ),
)
leaves = strings | st.sampled_from(
    [{"type": "integer"}, {"type": "boolean"}, {"$ref": "#/$defs/short"}, {"$ref": "#"}, True]
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, needed: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:needed],
        },
        st.dictionaries(st.sampled_from(_WORDS), inner, min_size=1, max_size=3),
        st.integers(0, 3),
    )
    return st.one_of(
        objects,
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": [first], "items": rest},
            inner,
            inner,
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda more: {"type": "object", "additionalProperties": more}, inner),
    )


schemas = st.builds(
    lambda schema, short: {
        "$defs": {"short": short},
        "type": "object",
        "properties": {"first": schema, "second": {"type": "string", "maxLength": 9}},
        "required": ["first", "second"],
    },
    st.recursive(leaves, _containers, max_leaves=5),
    strings,
)


@settings(max_examples=25)
@given(schema=schemas, seed=st.integers(0, 2**20))
def test_masks_at_every_position_equal_llguidances(
    walking: Compiler, schema: Any, seed: int
) -> None:
    Walk(walking, schema, seed).run(60)


@pytest.fixture(scope="module")
def remembering(tokenizer: Tokenizer) -> Iterator[Compiler]:
    config = CompilerConfig(threads=1, walks=True, memory_bytes=10_000_000)
    made = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS, config)
    made.warm_up()
    assert made._tables is not None
    made._tables.result()
    yield made
    made.shutdown()


@settings(max_examples=15)
@given(schema=schemas, seed=st.integers(0, 2**20))
def test_remembered_masks_are_those_of_llguidance(
    remembering: Compiler, schema: Any, seed: int
) -> None:
    for i in range(5):
        Walk(remembering, schema, seed + i // 2).run(40)


@pytest.mark.slow
@settings(max_examples=150)
@given(schema=schemas, seed=st.integers(0, 2**20))
def test_many_remembered_masks_are_those_of_llguidance(
    remembering: Compiler, schema: Any, seed: int
) -> None:
    for i in range(8):
        Walk(remembering, schema, seed + i // 2).run(100)


def test_masks_are_remembered_whatever_free_strings_say(
    remembering: Compiler, tokenizer: Tokenizer
) -> None:
    """Not behind what decides something."""
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "kind": {"enum": ["file", "folder"]},
            "line": {"type": "integer"},
        },
        "required": ["path", "kind", "line"],
        "additionalProperties": False,
    }
    memory = remembering.memory
    assert memory is not None
    found = []
    for path, kind in [("a/b.py", "file"), ("c d", "file"), ("e", "file"), ("a/b.py", "folder")]:
        walk = Walk(remembering, schema, seed=0)
        before = memory.lookups, memory.hits
        walk.write(tokenizer, json.dumps({"path": path, "kind": kind, "line": 12}))
        found.append((memory.lookups - before[0], memory.hits - before[1]))
    assert found[0][1] == 0
    assert found[1][0] == found[1][1] == found[2][1] > 10
    assert 0 < found[3][1] < found[3][0]


def test_masks_are_remembered_whatever_complete_values_say(
    remembering: Compiler, tokenizer: Tokenizer
) -> None:
    """Items, properties and white space that are complete, and the indent of a line."""
    item = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["file", "folder"]},
            "line": {"type": "integer"},
            "code": {"type": "string", "pattern": "^[a-z]{2,9}$"},
        },
        "required": ["kind", "line", "code"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": 1000}
    memory = remembering.memory
    assert memory is not None
    first = [{"kind": "file", "line": 12, "code": "ab"}, {"kind": "file", "line": 5, "code": "cd"}]
    others = [{"kind": "folder", "line": 7, "code": "xyz"}, *first]
    Walk(remembering, schema, seed=0).write(tokenizer, json.dumps(first, indent=2)[:-2])
    before = memory.lookups, memory.hits
    Walk(remembering, schema, seed=0).write(tokenizer, json.dumps(others, indent=2)[:-2])
    lookups, hits = memory.lookups - before[0], memory.hits - before[1]
    assert hits > 0.8 * lookups


@pytest.mark.parametrize(
    "item",
    [
        {"anyOf": [
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "integer"}},
             "required": ["a", "b"], "additionalProperties": False},
            {"type": "object", "properties": {"a": {"const": 2}, "b": {"type": "boolean"}},
             "required": ["a", "b"], "additionalProperties": False},
        ]},
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "minProperties": 1, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "additionalProperties": {"type": "boolean"}},
        {"type": "object", "properties": {"ab": {"type": "integer"}, "a b": {"type": "boolean"}},
         "additionalProperties": False},
    ],
)  # fmt: skip
def test_places_that_differ_are_told_apart(remembering: Compiler, item: Any) -> None:
    """Values that decide what comes, counts, and names that may come once."""
    for outer in ({"type": "array", "items": item, "minItems": 50}, item):
        for seed in range(12):
            Walk(remembering, outer, seed // 2).run(60)


PATTERNS = [
    "^https?://[A-Za-z0-9./_-]{3,200}$",
    "^https://[a-z0-9.-]{3,40}/[A-Za-z0-9_/-]{0,60}$",
    "^[A-Z]{2}-[0-9]{3,9}$",
    "^\\d{1,12}$",
    "^v?[0-9]+\\.[a-z ]{2,30}$",
    "^[0-9]{2}-?[a-f]{0,6}$",
    "^[0-9]{1,3}[a-f]{0,6}$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ends_of_patterns_are_put_together(
    walking: Compiler, remembering: Compiler, pattern: str
) -> None:
    text = {"type": "string", "pattern": pattern}
    code = {
        "type": "object",
        "properties": {"text": text, "more": {"type": "integer"}},
        "required": ["text", "more"],
        "additionalProperties": False,
    }
    for item in (text, code):
        schema = {"type": "array", "items": item, "minItems": 50}
        for compiler in (walking, remembering):
            assert sum(Walk(compiler, schema, seed).run(60) for seed in range(6)) > 5


def test_ends_of_patterns() -> None:
    def left(pattern: str, content: bytes) -> int:
        tail = pattern_tail(translate(pattern))
        assert tail is not None
        return tail.left(content)

    assert left(PATTERNS[0], b"https:/") == -1
    assert left(PATTERNS[0], b"http://ab") == -1
    assert left(PATTERNS[0], b"http://abc") == 197
    assert left(PATTERNS[1], b"https://ab/") == -1
    assert left(PATTERNS[1], b"https://a.bc/") == 60
    assert left(PATTERNS[1], b"https://a.bc/d/e") == 57
    assert left(PATTERNS[3], b"123456789012") == 0
    # The dash or another digit may still come.
    assert left(PATTERNS[5], b"12") == left(PATTERNS[6], b"12") == -1
    assert left(PATTERNS[5], b"12a") == left(PATTERNS[5], b"12-a") == 5
    assert left(PATTERNS[6], b"1a") == left(PATTERNS[6], b"123a") == 5


@pytest.mark.parametrize(
    "pattern",
    [
        "^[a-z]+[a-z]{1,3}$",
        "^a?[a-c]{2,5}$",
        "^(?:a|b){1,3}$",
        "^[0-9]{5}(-[0-9]{4})?$",
        "^.{1,5}$",
        "^[à-ü]{1,5}$",
        "^[a-z]*$",
        "^[a-z]{4}$",
        "[a-z]{1,4}$",
        '^["a]{1,4}$',
    ],
)
def test_patterns_without_such_an_end(walking: Compiler, pattern: str) -> None:
    """Characters that two parts could take, others than JSON's plain ones, other forms."""
    assert pattern_tail(translate(pattern)) is None
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}, "minItems": 50}
    Walk(walking, schema, seed=1).run(40)


def test_blanks_in_names_tell_them_apart(remembering: Compiler, tokenizer: Tokenizer) -> None:
    """Also where one token ends the name."""
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}, "a b": {"type": "boolean"}},
        "additionalProperties": False,
    }
    for text in ('{"ab": 1}', '{"a b": true}', '{"a b": true}'):
        Walk(remembering, schema, seed=0).write(tokenizer, text)


def test_lookups_that_find_little_end() -> None:
    memory = MaskMemory(10_000)
    use, line = memory.use(b"grammar"), np.zeros(8, dtype=np.int32)
    for _ in range(1100):
        assert not memory.recall(use, use.root, b"x", 1, 0, line)
    assert not memory.use(b"grammar").pays
    assert memory.use(b"another").pays


@pytest.mark.slow
@settings(max_examples=150)
@given(schema=schemas, seed=st.integers(0, 2**20))
def test_masks_of_many_documents_equal_llguidances(
    walking: Compiler, schema: Any, seed: int
) -> None:
    Walk(walking, schema, seed).run(150)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "string", "maxLength": 12},
        {"type": "string", "maxLength": 300},
        {"type": "string"},
        {},
        {"type": "string", "minLength": 3, "maxLength": 12},
        {"type": ["null", "string"], "maxLength": 12},
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/text"}]},
    ],
)
def test_strings_bounded_by_length_are_put_together(walking: Compiler, item: Any) -> None:
    schema = {
        "$defs": {"text": {"type": "string", "maxLength": 12}},
        "type": "array",
        "items": item,
        "minItems": 50,
    }
    assert Walk(walking, schema, seed=1).run(100) > 20


@pytest.mark.parametrize(
    "item",
    [
        {"type": "string", "maxLength": 12, "pattern": "^[a-z]*$"},
        {"type": "string", "pattern": "^[a-z]*$"},
        {"type": "string", "format": "date"},
        {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "string", "maxLength": 13}]},
        {"anyOf": [{"type": "string", "maxLength": 12}, {"enum": ["abc"]}]},
    ],
)
def test_other_strings_are_left_to_llguidance(walking: Compiler, item: Any) -> None:
    other = {"type": "string", "maxLength": 5}
    schema = {"type": "array", "items": item, "minItems": 50, "prefixItems": [other]}
    places = string_places(schema)
    assert places.length(places.item(places.root, 0)) == (0, 5)
    assert places.length(places.item(places.root, 1)) is None
    Walk(walking, schema, seed=1).run(100)


def walk_of(compiler: Compiler, schema: Any) -> StringWalk:
    asked = StructuredOutputsParams(json=json.dumps(schema))
    compiler.compile(asked).result()
    walk = compiler.walk(asked)
    assert walk is not None
    return walk


def test_characters_are_counted_across_tokens(walking: Compiler, tokenizer: Tokenizer) -> None:
    """Characters of several bytes and escapes may end in the next token."""
    walk = walk_of(walking, {"type": "string", "maxLength": 30})
    text = '"ab\\n\\"é日本😀\\\\'.encode()
    by_byte = {walk.tables.text(token): token for token in range(tokenizer.vocab_size)}
    left = []
    for i in range(len(text)):
        walk.take([by_byte[text[i : i + 1]]])
        left.append(walk.left)
    whole = [30, 29, 28, -1, 27, -1, 26, -1, 25, -1, -1, 24, -1, -1, 23, -1, -1, -1, 22, -1, 21]
    assert left == whole
    walk.take([by_byte[b'"']])
    assert walk.left == -1


def test_names_may_be_written_with_escapes(walking: Compiler, tokenizer: Tokenizer) -> None:
    walk = walk_of(
        walking,
        {
            "type": "object",
            "properties": {
                'a"{': {"type": "string", "maxLength": 7},
                "b": {"type": "string", "maxLength": 9},
            },
        },
    )
    ids = tokenizer.encode('{"a\\"{": "x', add_special_tokens=False).tolist()
    walk.take(ids)
    walk.settle()
    assert walk.left == 6
    walk.take(tokenizer.encode('", "b": "x', add_special_tokens=False).tolist())
    walk.settle()
    assert walk.left == 8


def test_what_has_no_schema_is_not_followed(walking: Compiler) -> None:
    for asked in (
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex="[a-z]{3}"),
    ):
        walking.compile(asked).result()
        assert walking.walk(asked) is None


def test_unusual_schemas_are_followed_or_left_out() -> None:
    """Values and names that look like keywords, references without a target, recursion."""
    bounded = {"type": "string", "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {
            "properties": True,
            "prefixItems": bounded,
            "anchor": {"$ref": "#there"},
            "loop": {"$ref": "#/properties/loop"},
            "const": {"const": {"properties": 5}},
            "one": {"allOf": [bounded]},
        },
    }
    places = string_places(schema)
    found = {
        name: places.length(places.value(places.root, name))
        for name in (*schema["properties"], "unknown")  # type: ignore[misc]
    }
    assert found.pop("prefixItems") == (0, 3)
    assert found.pop("one") == (0, 3)
    assert found.pop("properties") == found.pop("unknown") == (0, UNBOUNDED)
    assert set(found.values()) == {None}
