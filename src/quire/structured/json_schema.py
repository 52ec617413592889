"""JSON Schemas that can be enforced, and their form for llguidance.

llguidance ignores what it does not know and differs from the standard in a few places, where a
document that its grammar lets through would be invalid. Here every keyword is either enforced, an
annotation, or refused with its JSON pointer; those few places are written in other words, or
refused as well. What comes out is a schema of draft 2020-12.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from quire.errors import GrammarError
from quire.structured.bounded import EXACT, bound, resolve, types_of
from quire.structured.disjoint import disjoint
from quire.structured.patterns import FORMATS, HARMLESS_FORMATS, translate, unwritable

MAX_DEPTH = 64
"""Schemas within schemas."""
MAX_PROPERTIES = 5000
"""Properties and pattern properties, in all."""
MAX_VALUES = 20_000
"""Values of enumerations and names required, in all."""

Json = Any
_DIALECT = re.compile(
    r"https?://json-schema\.org/(?:(?:draft-0[467]|draft/(?:2019-09|2020-12))/)?schema#?"
)
_LATEST = re.compile(r"2020-12|json-schema\.org/schema")
_MOST_ARRAYS = 2000
"""Arrays of distinct items that are listed one by one."""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$comment", "discriminator",
     # OpenAPI's, editors' and generators'
     "externalDocs", "xml", "propertyOrdering", "markdownDescription", "enumNames",
     "enumDescriptions", "markdownEnumDescriptions", "deprecationMessage", "errorMessage",
     "defaultSnippets", "doNotSuggest", "suggestSortText", "tsType"}
)  # fmt: skip
_X_GUIDANCE = "x-guidance"
_SEPARATORS = {
    "item_separator": re.compile("[ \t\r\n]*,[ \t\r\n]*"),
    "key_separator": re.compile("[ \t\r\n]*:[ \t\r\n]*"),
}
_SWITCHES = ("whitespace_flexible", "lenient", "open_objects", "open_numbers")
_UNSUPPORTED = "unsupported_schema"


def enforceable(schema: Json) -> dict[str, Json]:
    """Returns the schema as llguidance enforces it to the letter, with bounds for what it leaves
    open. What cannot be enforced is left out if the schema says so (`"x-guidance": {"lenient":
    true}`).

    Raises:
        GrammarError: it is malformed, too large, or says what cannot be enforced; with the pointer
            of the keyword.
    """
    reader = _Reader(schema)
    done: dict[str, Json] = reader.schema(schema, "#", 0)
    reader.check_references(done)
    bound(
        done,
        reader.places.values(),
        open_objects=reader.option_of("open_objects"),
        open_numbers=reader.option_of("open_numbers"),
    )
    return done


def refuse(pointer: str, why: str, code: str = _UNSUPPORTED) -> GrammarError:
    return GrammarError(f"Invalid schema at '{pointer}': {why}.", code=code, pointer=pointer)


def _within(pointer: str, name: str | int) -> str:
    return f"{pointer}/{str(name)[:200].replace('~', '~0').replace('/', '~1')}"


class _Reader:
    """Walks over a schema once.

    places: all schemas met, in their new words, by their old pointers.
    beside: the schema whose keyword is read, as it was given.
    """

    def __init__(self, root: Json) -> None:
        self.root = root
        self.lenient = self.option_of("lenient")
        self.places: dict[str, Json] = {}
        self.references: list[tuple[str, str]] = []
        self.properties = self.values = 0
        self.beside: dict[str, Json] = {}

    def option_of(self, name: str) -> bool:
        """Returns whether an option of the root is on."""
        options = self.root.get(_X_GUIDANCE) if isinstance(self.root, dict) else None
        return isinstance(options, dict) and options.get(name) is True

    def schema(self, schema: Json, at: str, depth: int) -> Json:
        """One schema, in its new words."""
        if schema is True:
            schema = {}
        if schema is False:
            self.places[at] = schema
            if at == "#":
                raise refuse(at, "nothing is valid against it", "invalid_schema")
            return schema
        if not isinstance(schema, dict):
            raise refuse(at, "a schema is an object, true or false", "invalid_schema")
        if depth > MAX_DEPTH:
            raise refuse(at, f"it is nested more than {MAX_DEPTH} deep", "schema_too_large")
        out: dict[str, Json] = {}
        self.places[at] = out
        for name, value in schema.items():
            if name in ANNOTATIONS or (name.startswith("x-") and name != _X_GUIDANCE):
                continue
            try:
                read = _KEYWORDS.get(name, _Reader.unknown)
                self.beside = schema
                read(self, out, name, value, at, depth)
            except GrammarError as error:
                if not self.lenient or error.code != _UNSUPPORTED:
                    raise
        rest = out.pop("additionalItems", None)
        if rest is not None and isinstance(schema.get("items"), list):
            out["items"] = rest
        if "uniqueItems" in out:
            self._list_arrays(out)
        self._check_min_properties(schema, at)
        if schema.get("nullable") is True and "type" in out:
            types = out["type"] if isinstance(out["type"], list) else [out["type"]]
            out["type"] = list(dict.fromkeys((*types, "null")))
        return out

    # -- keywords: each puts into `out` what is to be enforced ---------------------------------

    def unknown(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        raise refuse(_within(at, name), f"the keyword '{name[:100]}' cannot be enforced")

    def dialect(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if at != "#" or not isinstance(value, str) or not _DIALECT.fullmatch(value):
            raise refuse(
                _within(at, name), "it must be draft 4, 6, 7, 2019-09 or 2020-12, at the root"
            )

    def identifier(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if at != "#" or not isinstance(value, str):
            raise refuse(_within(at, name), "only the root may have one, which is a string")

    def option(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if at != "#" or not isinstance(value, dict):
            raise refuse(here, "it is an object of options at the root", "invalid_schema")
        for option, setting in value.items():
            switch = option in _SWITCHES
            separator = _SEPARATORS.get(option)
            fits = isinstance(setting, str) and separator and separator.fullmatch(setting)
            if not (switch and isinstance(setting, bool)) and not fits:
                raise refuse(
                    _within(here, option), "this option cannot be set so", "invalid_schema"
                )
        out[name] = value

    def typed(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        types = value if isinstance(value, list) else [value]
        if not types or any(not isinstance(t, str) or t not in _TYPES for t in types):
            raise refuse(_within(at, name), f"known are {', '.join(_TYPES)}", "invalid_schema")
        out[name] = value

    def text(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if not isinstance(value, str):
            raise refuse(_within(at, name), "it must be a string", "invalid_schema")
        out[name] = value

    def subschema(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        out[name] = self.schema(value, _within(at, name), depth + 1)

    def subschemas(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        # Other keywords may have added to `allOf`; the user's own stay where references seek them.
        out[name] = [*self._list(name, value, at, depth), *out.get(name, ())]

    def _list(self, name: str, value: Json, at: str, depth: int) -> list[Json]:
        here = _within(at, name)
        if not isinstance(value, list) or not value:
            raise refuse(here, "it must be a non-empty list of schemas", "invalid_schema")
        return [self.schema(s, _within(here, i), depth + 1) for i, s in enumerate(value)]

    def one_of(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Reads `oneOf` as `anyOf`, if no document can match two of the options."""
        options = self._list(name, value, at, depth)
        if self.lenient or disjoint(value, self.root):
            self.also(out, {"anyOf": options})
        else:
            raise refuse(
                _within(at, name),
                "its options must exclude each other in a way that can be seen: by type, or by a "
                "required property with different 'const' values. Use 'anyOf'",
            )

    def also(self, out: dict[str, Json], more: dict[str, Json]) -> None:
        out["allOf"] = [*out.get("allOf", ()), more]

    def items(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Reads `items`; a list is the older form of `prefixItems`."""
        if isinstance(value, list):
            if "prefixItems" in out:
                raise refuse(_within(at, name), "it cannot be a list beside 'prefixItems'")
            out["prefixItems"] = self._list(name, value, at, depth) if value else []
        else:
            self.subschema(out, name, value, at, depth)

    def prefix(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        dialect = self.root.get("$schema", "2020-12") if isinstance(self.root, dict) else ""
        if name in out or not _LATEST.search(dialect):
            raise refuse(_within(at, name), "it needs draft 2020-12, and no list as 'items'")
        out[name] = self._list(name, value, at, depth)

    def named(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if not isinstance(value, dict):
            raise refuse(here, "it must be an object of schemas", "invalid_schema")
        self.properties += len(value)
        if self.properties > MAX_PROPERTIES:
            raise refuse(
                here, f"there are more than {MAX_PROPERTIES} properties", "schema_too_large"
            )
        out[name] = {k: self.schema(s, _within(here, k), depth + 1) for k, s in value.items()}

    def own(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        self.named(out, name, value, at, depth)
        for key in value:
            self._check_text(key, _within(_within(at, name), key))

    def _check_text(self, text: str, at: str) -> None:
        if unwritable(text):
            raise refuse(at, "control characters without an escape of their own cannot be enforced")

    def by_pattern(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        self.named(out, name, value, at, depth)
        here = _within(at, name)
        out[name] = {self._pattern(k, _within(here, k)): s for k, s in out[name].items()}
        if len(out[name]) < len(value):
            raise refuse(here, "two of its patterns mean the same")

    def _pattern(self, pattern: Json, at: str) -> str:
        if not isinstance(pattern, str):
            raise refuse(at, "it must be a string", "invalid_schema")
        try:
            return translate(pattern)
        except GrammarError as error:
            raise refuse(at, f"the pattern {pattern[:100]!r} cannot be enforced: {error}") from None

    def pattern(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        out[name] = self._pattern(value, _within(at, name))

    def format(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if isinstance(value, str) and value in HARMLESS_FORMATS:
            return
        if isinstance(value, str) and value in _INTEGER_FORMATS:
            low, high = _INTEGER_FORMATS[value]
            self.also(out, {"minimum": low, "maximum": high})
            return
        if not isinstance(value, str) or value not in FORMATS:
            raise refuse(
                _within(at, name),
                f"the format {str(value)[:100]!r} cannot be enforced; known are "
                f"{', '.join((*FORMATS, *_INTEGER_FORMATS, *HARMLESS_FORMATS))}",
            )
        patterns, longest = FORMATS[value]
        for pattern in patterns:
            self.also(out, {"pattern": f"^(?:{pattern})$"})
        if longest is not None:
            self.also(out, {"maxLength": longest})

    def names(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise refuse(here, "it must be a list of names", "invalid_schema")
        self._count(len(value), here)
        for i, item in enumerate(value):
            self._check_text(item, _within(here, i))
        out[name] = value

    def enumeration(
        self, out: dict[str, Json], name: str, value: Json, at: str, depth: int
    ) -> None:
        here = _within(at, name)
        if not isinstance(value, list) or not value:
            raise refuse(here, "it must be a non-empty list", "invalid_schema")
        self._count(len(value), here)
        for i, item in enumerate(value):
            self._check_value(item, _within(here, i), 0)
        out[name] = _whole_numbers(value)

    def constant(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        self._check_value(value, _within(at, name), 0)
        out[name] = _whole_numbers(value)

    def _count(self, values: int, at: str) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise refuse(at, f"there are more than {MAX_VALUES} values", "schema_too_large")

    def _check_value(self, value: Json, at: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise refuse(at, f"it is nested more than {MAX_DEPTH} deep", "schema_too_large")
        if isinstance(value, (dict, list)):
            self._count(len(value), at)
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in parts:
                self._check_text(str(key), at)
                self._check_value(part, _within(at, key), depth + 1)
        elif isinstance(value, str):
            self._check_text(value, at)
        elif isinstance(value, int) and abs(value) > EXACT:
            raise refuse(at, "integers beyond 2**53 cannot be enforced")

    def bound(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        inclusive = _INCLUSIVE.get(name, "")
        if isinstance(value, bool) and inclusive in self.beside:  # as draft 4 has it
            if value:
                self.bound(out, name, self.beside[inclusive], at, depth)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(here, "it must be a number", "invalid_schema")
        if not math.isfinite(value) or abs(value) > EXACT:
            raise refuse(here, "bounds beyond 2**53 cannot be enforced")
        if name == "multipleOf" and value <= 0:
            raise refuse(here, "it must be greater than 0", "invalid_schema")
        out[name] = value

    def count(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < 0:
            raise refuse(_within(at, name), "it must be an integer of at least 0", "invalid_schema")
        if value > EXACT:
            raise refuse(_within(at, name), "it is too large to be enforced")
        out[name] = int(value)

    def nullable(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """OpenAPI 3.0's; `schema` adds the type, as it holds for a `type` beside it only."""
        here = _within(at, name)
        if not isinstance(value, bool):
            raise refuse(here, "it must be true or false", "invalid_schema")
        if value and "type" not in self.beside:
            raise refuse(here, "it needs a 'type' beside it. Use 'anyOf' with {\"type\": \"null\"}")

    def unique(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Lists the arrays, where they are few."""
        here = _within(at, name)
        if not isinstance(value, bool):
            raise refuse(here, "it must be true or false", "invalid_schema")
        schema = self.beside
        most = schema.get("maxItems")
        if not value or (isinstance(most, int) and most <= 1):
            return
        items = schema.get("items")
        if isinstance(items, dict) and isinstance(items.get("$ref"), str):
            items = resolve(self.root, unquote(items["$ref"]))
        arrays = _distinct(items, schema.get("minItems", 0), most)
        if not arrays:
            raise refuse(
                here,
                "it can be enforced only where 'items' is an 'enum' and there are at most "
                f"{_MOST_ARRAYS} arrays (which 'maxItems' may bound). "
                '"x-guidance": {"lenient": true} at the root leaves out what cannot be enforced',
            )
        out[name] = arrays

    def _list_arrays(self, out: dict[str, Json]) -> None:
        """Puts the arrays that `unique` has listed in the place of keywords that they obey."""
        arrays = out.pop("uniqueItems")
        for name in ("items", "minItems", "maxItems"):
            out.pop(name, None)
        others = [kind for kind in types_of(out) or _TYPES if kind != "array"]
        if others:
            self.also(out, {"anyOf": [{"enum": arrays}, {"type": others}]})
        else:
            self.also(out, {"enum": arrays})
            del out["type"]

    def reference(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if not isinstance(value, str) or not value.startswith("#"):
            raise refuse(here, "only references within the schema ('#...') can be enforced")
        if value == "#" or value.startswith("#/"):
            self.references.append((unquote(value), here))
        out[name] = value

    # -- afterwards ----------------------------------------------------------------------------

    def check_references(self, done: Json) -> None:
        """Checks that each reference's target has been read as a schema and is still there, so
        that nothing is enforced that was not looked at."""
        for target, at in self.references:
            place = self.places.get(target)
            if place is None or resolve(done, target) is not place:
                raise refuse(at, f"a reference to '{target[:200]}' cannot be enforced")

    def _check_min_properties(self, schema: dict[str, Json], at: str) -> None:
        """Names that are not listed may come twice in a document, and then count once only."""
        least = schema.get("minProperties", 0)
        if least > 1 and least > len(set(schema.get("required", ()))):
            raise refuse(
                _within(at, "minProperties"),
                "more than 1 can be enforced only where as many are 'required'",
            )


def _whole_numbers(value: Json) -> Json:
    """Returns a value with 1.0 as 1: they are equal, and one of them an integer by its looks."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return value


def _distinct(items: Json, least: Json, most: Json) -> list[list[Json]] | None:
    """Returns the arrays of `least` to `most` distinct values of an enumeration, in every order;
    None where they cannot be listed, or are too many."""
    if not isinstance(items, dict) or not items.keys() - ANNOTATIONS <= {"enum", "type"}:
        return None
    values = items.get("enum")
    if not isinstance(values, list) or not isinstance(least, int | float):
        return None
    kinds = types_of(items)
    if any(type(value) not in (str, int) for value in values):
        return None
    fitting = [v for v in values if not kinds or kinds & _KINDS_OF[type(v)]]
    unique = list(dict.fromkeys(fitting))
    longest = min(len(unique), int(most)) if isinstance(most, int | float) else len(unique)
    sizes = range(math.ceil(least), longest + 1)
    if not unique or sum(math.perm(len(unique), size) for size in sizes) > _MOST_ARRAYS:
        return None
    return [list(array) for size in sizes for array in permutations(unique, size)]


_KINDS_OF = {str: {"string"}, int: {"integer", "number"}}
_INCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}

_INTEGER_FORMATS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "int64": (-EXACT, EXACT),
    "uint64": (0, EXACT),
}
"""Maps OpenAPI's formats of numbers to bounds within them."""

_KEYWORDS: dict[str, Callable[[_Reader, dict[str, Json], str, Json, str, int], None]] = {
    **dict.fromkeys(("anyOf", "allOf"), _Reader.subschemas),
    **dict.fromkeys(("$defs", "definitions"), _Reader.named),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _Reader.bound
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _Reader.count,
    ),
    "$anchor": _Reader.text,
    "$id": _Reader.identifier,
    "id": _Reader.identifier,
    "$ref": _Reader.reference,
    "$schema": _Reader.dialect,
    "additionalItems": _Reader.subschema,
    "additionalProperties": _Reader.subschema,
    "const": _Reader.constant,
    "enum": _Reader.enumeration,
    "format": _Reader.format,
    "items": _Reader.items,
    "nullable": _Reader.nullable,
    "oneOf": _Reader.one_of,
    "pattern": _Reader.pattern,
    "patternProperties": _Reader.by_pattern,
    "prefixItems": _Reader.prefix,
    "properties": _Reader.own,
    "required": _Reader.names,
    "type": _Reader.typed,
    "uniqueItems": _Reader.unique,
    _X_GUIDANCE: _Reader.option,
}
"""The reader of each keyword."""
