"""Rewrites a JSON Schema so that llguidance enforces it exactly, or refuses it.

llguidance ignores unknown keywords and in a few places accepts documents that the standard does
not. Here every keyword of the standard is enforced, is an annotation, or is refused with its JSON
pointer. Where llguidance differs, the rule is rewritten or refused. Unknown keywords are ignored,
as the standard demands, unless they look like a misspelling. The result is a schema of draft
2020-12.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import permutations, product
from typing import Any
from urllib.parse import quote, unquote

from quire.errors import GrammarError
from quire.grammar.bounded import EXACT, bound, resolve, types_of
from quire.grammar.disjoint import disjoint
from quire.grammar.keywords import ANNOTATIONS, NOT_ENFORCED, closest_keyword, closest_word
from quire.grammar.patterns import FORMATS, HARMLESS_FORMATS, format_rules, rules_of, unwritable

MAX_DEPTH = 64
"""Deepest nesting of schemas."""
MAX_PROPERTIES = 5000
"""Most properties and pattern properties in total."""
MAX_VALUES = 20_000
"""Most values of enumerations and required names in total."""

Json = Any
_DIALECT = re.compile(
    r"https?://json-schema\.org/(?:(?:draft-0[467]|draft/(?:2019-09|2020-12))/)?schema#?"
    # Snowplow's, which is draft 4 with labels
    r"|https?://iglucentral\.com/schemas/com\.snowplowanalytics\.self-desc/schema/jsonschema/1-0-0#?"
)
_LATEST = re.compile(r"2020-12|json-schema\.org/schema")
_MOST_ARRAYS = 2000
"""Most arrays to list one by one for `uniqueItems`."""
_MOST_OPTIONS = 64
"""Most options into which a `oneOf` of required names is rewritten."""
_OF_OBJECTS = frozenset(
    {"properties", "required", "patternProperties", "additionalProperties", "propertyNames",
     "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "$ref", "dependencies",
     "dependentRequired", "dependentSchemas", "nullable"}
)  # fmt: skip
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_X_GUIDANCE = "x-guidance"
_SEPARATORS = {
    "item_separator": re.compile("[ \t\r\n]*,[ \t\r\n]*"),
    "key_separator": re.compile("[ \t\r\n]*:[ \t\r\n]*"),
}
_SWITCHES = ("whitespace_flexible", "lenient", "open_objects", "open_numbers")
_UNSUPPORTED = "unsupported_schema"
_SAFE = "#/~!$&'()*+,;=:@?"
"""Characters that are not percent-encoded in a reference."""
_BELOW = "quire:below-unknown-"
"""Prefix for the names of definitions found below an unknown keyword."""


def enforceable(schema: Json) -> dict[str, Json]:
    """Returns an equivalent schema that llguidance enforces exactly, with the bounds of
    `bounded.py`.

    With `"x-guidance": {"lenient": true}` rules that cannot be enforced are left out.

    Raises:
        GrammarError: the schema is malformed or too large, or a rule cannot be enforced. The error
            has the keyword's pointer.
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


def _always(schema: Json) -> bool:
    """Returns whether a schema obviously accepts every document."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _within(pointer: str, name: str | int) -> str:
    return f"{pointer}/{str(name)[:200].replace('~', '~0').replace('/', '~1')}"


class _Reader:
    """Rewrites a schema in one walk.

    Attributes:
        places: all schemas seen, rewritten, by their pointers in the original.
        current: the original schema whose keywords are being read.
        anchors: pointers of schemas with an anchor, by name.
        resources: number of enclosing schemas with their own identifier.
        identifier: of the root, without a fragment.
    """

    def __init__(self, root: Json) -> None:
        self.root = root
        self.lenient = self.option_of("lenient")
        self.places: dict[str, Json] = {}
        self.references: list[tuple[dict[str, Json], str, str]] = []
        self.anchors: dict[str, str] = {}
        self.resources = 0
        identifier = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self.identifier = identifier.split("#")[0] if isinstance(identifier, str) else ""
        self.properties = self.values = 0
        self.current: dict[str, Json] = {}

    def option_of(self, name: str) -> bool:
        """Returns whether an option of the root is on."""
        options = self.root.get(_X_GUIDANCE) if isinstance(self.root, dict) else None
        return isinstance(options, dict) and options.get(name) is True

    def schema(self, schema: Json, at: str, depth: int) -> Json:
        """Returns one schema, rewritten.

        Args:
            schema: the original.
            at: its pointer.
            depth: number of schemas around it.
        """
        if schema is True:
            schema = {}
        elif isinstance(schema, dict) and _always(schema.get("not", False)):
            schema = False
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
        resource = at != "#" and self._identifies(schema)
        self.resources += resource
        for name, value in schema.items():
            if name in ANNOTATIONS or (name.startswith("x-") and name != _X_GUIDANCE):
                continue
            try:
                read = _KEYWORDS.get(name, _Reader.unknown)
                self.current = schema
                read(self, out, name, value, at, depth)
            except GrammarError as error:
                if not self.lenient or error.code != _UNSUPPORTED:
                    raise
        self.resources -= resource
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

    # -- keywords: each method adds the rewritten rule to `out` ---------------------------------

    def unknown(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Ignores a keyword that is not in the standard, unless it looks like a misspelling."""
        if name in NOT_ENFORCED:
            raise refuse(_within(at, name), f"the keyword '{name[:100]}' cannot be enforced")
        keyword = closest_keyword(name, value)
        if keyword is not None:
            raise refuse(
                _within(at, name),
                f"there is no keyword '{name[:100]}'; '{keyword}' may be meant. A word of your own "
                "that looks like a keyword can begin with 'x-'",
            )

    def dialect(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if not isinstance(value, str) or not _DIALECT.fullmatch(value):
            raise refuse(here, "it must be draft 4, 6, 7, 2019-09 or 2020-12")
        if at != "#" and bool(_LATEST.search(value)) != self._latest():
            raise refuse(here, "it must name the same draft as the root")

    def _latest(self) -> bool:
        """Returns whether the schema is of draft 2020-12."""
        dialect = self.root.get("$schema", "2020-12") if isinstance(self.root, dict) else ""
        return isinstance(dialect, str) and bool(_LATEST.search(dialect))

    def identifier_of(
        self, out: dict[str, Json], name: str, value: Json, at: str, depth: int
    ) -> None:
        if not isinstance(value, str):
            raise refuse(_within(at, name), "it must be a string")
        if value.startswith("#"):
            self._name(value[1:], at)

    def anchor(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if not isinstance(value, str):
            raise refuse(_within(at, name), "it must be a string", "invalid_schema")
        self._name(value, at)

    def _name(self, name: str, at: str) -> None:
        """Records the name of a schema, unless another schema has it. Names within an embedded
        resource are not recorded, because references to them are refused."""
        if not self.resources:
            self.anchors[name] = at if self.anchors.get(name, at) == at else ""

    def _identifies(self, schema: dict[str, Json]) -> bool:
        """Returns whether a schema has its own identifier, to which its references are relative."""
        given = [schema.get(name) for name in ("$id", "id")]
        return any(isinstance(value, str) and not value.startswith("#") for value in given)

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
            raise refuse(_within(at, name), f"types are {', '.join(_TYPES)}", "invalid_schema")
        out[name] = value

    def subschema(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        out[name] = self.schema(value, _within(at, name), depth + 1)

    def subschemas(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        # Other keywords may have added to `allOf`. The user's schemas keep their indices, because
        # references may point to them.
        read = self._list(name, value, at, depth)
        while name == "allOf" and len(read) > 1 and read[-1] == {}:
            read.pop()  # only a description, for which llguidance would copy the other schemas
        out[name] = [*read, *out.get(name, ())]

    def _list(self, name: str, value: Json, at: str, depth: int) -> list[Json]:
        here = _within(at, name)
        if not isinstance(value, list) or not value:
            raise refuse(here, "it must be a non-empty list of schemas", "invalid_schema")
        return [self.schema(s, _within(here, i), depth + 1) for i, s in enumerate(value)]

    def one_of(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Reads `oneOf` as `anyOf`, if no document can match two of the options."""
        alone = not self.current.keys() & (_OF_OBJECTS - {"oneOf"})
        options = self._list(name, value, at, depth)
        if self.lenient or disjoint(value, self.root):
            self.also(out, {"anyOf": options})
        elif (only := _exactly_one(value)) is not None:
            self.also(out, {"anyOf": only})
        elif alone and (disjoint([_closed(option) for option in value], self.root)):
            for option, read in zip(value, options, strict=True):
                if _closed(option) is not option:
                    read["additionalProperties"] = False
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
        """Reads `items`. In older drafts a list has the meaning of `prefixItems`."""
        if isinstance(value, list):
            if "prefixItems" in out:
                raise refuse(_within(at, name), "it cannot be a list beside 'prefixItems'")
            out["prefixItems"] = self._list(name, value, at, depth) if value else []
        else:
            self.subschema(out, name, value, at, depth)

    def prefix(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        if name in out or not self._latest():
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
        """Returns a pattern for names, translated to a single expression."""
        rules = self._patterns(pattern, None, at)
        if len(rules) != 1:
            raise refuse(at, f"the pattern {str(pattern)[:100]!r} cannot be enforced for names")
        return rules[0]

    def _patterns(self, pattern: Json, format: Json, at: str) -> list[str]:
        if not isinstance(pattern, str):
            raise refuse(at, "it must be a string", "invalid_schema")
        try:
            return rules_of(pattern, format if isinstance(format, str) else None)
        except GrammarError as error:
            raise refuse(at, f"the pattern {pattern[:100]!r} cannot be enforced: {error}") from None

    def pattern(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        rules = self._patterns(value, self.current.get("format"), _within(at, name))
        if rules:
            out[name] = rules[0]
        for rule in rules[1:]:
            self.also(out, {"pattern": rule})

    def format(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Enforces a format. Formats outside the standard are ignored, unless misspelled."""
        here = _within(at, name)
        if not isinstance(value, str):
            raise refuse(here, "it must be a string", "invalid_schema")
        if value in _INTEGER_FORMATS:
            low, high = _INTEGER_FORMATS[value]
            self.also(out, {"minimum": low, "maximum": high})
        elif value in FORMATS:
            for pattern in format_rules(value):
                self.also(out, {"pattern": pattern})
            longest = FORMATS[value][1]
            if longest is not None:
                self.also(out, {"maxLength": longest})
        elif value not in HARMLESS_FORMATS:
            known = closest_word(value, (*FORMATS, *_INTEGER_FORMATS))
            if known is not None:
                raise refuse(here, f"there is no format {value[:100]!r}; {known!r} may be meant")

    def encoding(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Enforces base64. 8bit and binary need no rule, because every text is valid in them."""
        if isinstance(value, str) and value.lower() in ("base64", "base64url"):
            self.format(out, name, value.lower(), at, depth)
        elif not isinstance(value, str) or value.lower() not in ("binary", "8bit", "identity"):
            raise refuse(
                _within(at, name),
                "only base64, base64url, 8bit and binary can be enforced",
            )

    def media_type(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Refuses JSON within a string. Other media types need no check by the standard."""
        if not isinstance(value, str) or "json" in value.lower():
            raise refuse(_within(at, name), "JSON within a string cannot be enforced")

    def property_names(
        self, out: dict[str, Json], name: str, value: Json, at: str, depth: int
    ) -> None:
        """Rewrites a rule for names as a list of properties or a pattern, with no others
        allowed."""
        here = _within(at, name)
        rule = value
        for _ in range(MAX_DEPTH):
            reference = rule.get("$ref") if isinstance(rule, dict) else None
            if not isinstance(reference, str) or rule.keys() - ANNOTATIONS != {"$ref"}:
                break
            rule = None if self.resources else resolve(self.root, unquote(reference))
        if rule is True:
            return
        if rule is False:
            self.also(out, {"maxProperties": 0})
            return
        if not isinstance(rule, dict):
            raise refuse(here, "a schema is an object, true or false", "invalid_schema")
        words = rule.keys() - ANNOTATIONS
        if "type" in words and "string" not in types_of(rule):
            self.also(out, {"maxProperties": 0})
            return
        words -= {"type", "$schema"}
        values = [rule["const"]] if "const" in words else rule.get("enum")
        if isinstance(values, list) and len(words) == 1:
            names = [text for text in values if isinstance(text, str)]
            self._count(len(names), here)
            for text in names:
                self._check_text(text, here)
            listed = {name: self._any_value(here) for name in names}
            self.also(out, {"properties": listed, "additionalProperties": False})
        elif words <= {"pattern", "format", "minLength", "maxLength"}:
            pattern = self._name_pattern(rule, here)
            if pattern is not None:
                matching = {pattern: self._any_value(here)}
                self.also(out, {"patternProperties": matching, "additionalProperties": False})
        else:
            raise refuse(
                here, "only 'pattern', 'format', lengths, 'enum' and 'const' can be enforced"
            )

    def _any_value(self, at: str) -> Json:
        """Returns a schema that accepts any value. `bounded.py` may limit it."""
        schema: dict[str, Json] = {}
        if not self.current.keys() & {"properties", "patternProperties", "additionalProperties"}:
            self.places[f"{at} {len(self.places)}"] = schema
        return schema

    def _name_pattern(self, rule: dict[str, Json], at: str) -> str | None:
        """Returns the expression for names, or None if every name is allowed."""
        read: dict[str, Json] = {}
        before, self.current = self.current, rule
        for name in ("pattern", "format", "minLength", "maxLength"):
            if name in rule:
                _KEYWORDS[name](self, read, name, rule[name], at, 0)
        self.current = before
        parts = (read, *read.pop("allOf", ()))
        found = [part["pattern"] for part in parts if "pattern" in part]
        lengths = [part for part in parts if part.keys() & {"minLength", "maxLength"}]
        if len(found) + len(lengths) > 1:
            raise refuse(
                at, "of 'pattern', 'format' and lengths, one alone can be enforced for names"
            )
        for part in lengths:
            least, most = part.get("minLength", 0), part.get("maxLength", "")
            found += self._patterns(f"^[^]{{{least},{most}}}$", None, at)
        return found[0] if found else None

    def negation(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Rewrites `not` in positive terms, or refuses it."""
        here = _within(at, name)
        if value is False:
            return
        words = {} if value is True else value
        if not isinstance(words, dict):
            raise refuse(here, "a schema is an object, true or false", "invalid_schema")
        words = {word: v for word, v in words.items() if word not in ANNOTATIONS}
        if words.keys() == {"type"}:
            self.typed({}, "type", words["type"], here, depth)
            excluded = types_of(words)
            excluded |= {"integer"} if "number" in excluded else set()
            if "integer" in excluded and "number" not in excluded:
                raise refuse(here, "numbers that are no integers cannot be enforced")
            self.also(out, {"type": [kind for kind in _TYPES if kind not in excluded]})
        elif words.keys() == {"required"} or (
            words.keys() == {"required", "type"} and words["type"] == "object"
        ):
            self.names({}, "required", words["required"], here, depth)
            self._exclude_required(out, words, here)
        elif words.keys() == {"anyOf"} and isinstance(words["anyOf"], list) and words["anyOf"]:
            for i, option in enumerate(words["anyOf"]):
                self.negation(out, str(i), option, f"{here}/anyOf", depth + 1)
        else:
            raise refuse(here, "only {}, 'type', 'required' and 'anyOf' of them can be excluded")

    def _exclude_required(self, out: dict[str, Json], excluded: dict[str, Json], at: str) -> None:
        """Rewrites "not (required names)": one of the names must be absent.

        If only objects are excluded, all other values are allowed too.
        """
        if not excluded["required"]:
            raise refuse(at, "every object has no properties at all", "invalid_schema")
        options: list[Json] = [{"properties": {name: False}} for name in excluded["required"]]
        self.also(out, options[0] if len(options) == 1 else {"anyOf": options})
        if "type" not in excluded:
            self.also(out, {"type": "object"})

    def dependent_names(
        self, out: dict[str, Json], name: str, value: Json, at: str, depth: int
    ) -> None:
        """Rewrites dependencies: the property is absent, or the names that depend on it are
        required."""
        here = _within(at, name)
        if not isinstance(value, dict):
            raise refuse(here, "it must be an object", "invalid_schema")
        for key, needed in value.items():
            there = _within(here, key)
            self._check_text(key, there)
            if isinstance(needed, list):
                self.names({}, key, needed, here, depth)
                if needed and set(needed) != {key}:
                    rule: Json = {"required": list(dict.fromkeys(needed))}
                    self.also(out, {"anyOf": [{"properties": {key: False}}, rule]})
            else:
                rule = self.schema(needed, there, depth + 1)
                self.also(out, {"anyOf": [{"properties": {key: False}}, rule]})

    def names(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        here = _within(at, name)
        if value is False:  # draft 3 has `required` in the property itself, as true or false
            return
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
        if isinstance(value, bool) and inclusive in self.current:  # the form of draft 4
            if value:
                self.bound(out, name, self.current[inclusive], at, depth)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(here, "it must be a number", "invalid_schema")
        if not math.isfinite(value) or abs(value) > EXACT:
            value = self._clamped(name, value, here)
        if name == "multipleOf" and value <= 0:
            raise refuse(here, "it must be greater than 0", "invalid_schema")
        out[name] = value

    def _clamped(self, name: str, value: float, at: str) -> float:
        """Returns 2**53, or its negative, in place of a lower or upper bound that no number
        reaches.

        Other bounds beyond 2**53 are refused, because they would exclude numbers.
        """
        low, high = name.lower().endswith("minimum"), name.lower().endswith("maximum")
        if self.option_of("open_numbers") or not ((low and value < 0) or (high and value > 0)):
            raise refuse(at, "bounds beyond 2**53 cannot be enforced")
        return -EXACT if low else EXACT

    def count(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < 0:
            raise refuse(_within(at, name), "it must be an integer of at least 0", "invalid_schema")
        if value > EXACT:
            raise refuse(_within(at, name), "it is too large to be enforced")
        out[name] = int(value)

    def nullable(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Checks OpenAPI 3.0's `nullable`. `schema` then adds null to the `type` next to it."""
        here = _within(at, name)
        if not isinstance(value, bool):
            raise refuse(here, "it must be true or false", "invalid_schema")
        if value and "type" not in self.current:
            raise refuse(here, "it needs a 'type' beside it. Use 'anyOf' with {\"type\": \"null\"}")

    def unique(self, out: dict[str, Json], name: str, value: Json, at: str, depth: int) -> None:
        """Enforces `uniqueItems` by listing all valid arrays, if they are few."""
        here = _within(at, name)
        if not isinstance(value, bool):
            raise refuse(here, "it must be true or false", "invalid_schema")
        schema = self.current
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
        """Replaces the keywords for arrays by the arrays that `unique` has listed."""
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
        if not isinstance(value, str):
            raise refuse(here, "it must be a string", "invalid_schema")
        document, sharp, place = value.partition("#")
        if document and (document != self.identifier or not sharp):
            raise refuse(here, "only references within the schema ('#...') can be enforced")
        if self.resources:
            raise refuse(here, "it is relative to an '$id' below the root, and cannot be enforced")
        target = f"#{unquote(place)}"
        out[name] = quote(target, safe=_SAFE)
        self.references.append((out, target, here))

    # -- after the walk -----------------------------------------------------------------------

    def check_references(self, done: Json) -> None:
        """Checks that each reference leads to a schema that was read and is in the result.

        Otherwise a rule could be enforced that was never checked. Targets below unknown keywords
        are read now.
        """
        beside: dict[str, Json] = {}
        while self.references:
            out, target, at = self.references.pop()
            if not target.startswith("#/") and target != "#":
                target = self.anchors.get(target[1:], "")
                out["$ref"] = quote(target, safe=_SAFE)
            if target not in self.places:
                schema = self._below_unknown(target, at)
                beside[f"{_BELOW}{len(beside)}"] = self.schema(schema, target, 1)
            place = self.places[target]
            for name, added in beside.items():
                if added is place:
                    out["$ref"] = f"#/$defs/{name}"
            if resolve(done, target) is not place and not any(
                added is place for added in beside.values()
            ):
                raise refuse(at, f"a reference to '{target[:200]}' cannot be enforced")
        if beside:
            done["$defs"] = {**done.get("$defs", {}), **beside}

    def _below_unknown(self, target: str, at: str) -> Json:
        """Returns the schema at a pointer below an unknown keyword."""
        schema, path = resolve(self.root, target), ""
        steps = target.split("/")[1:]
        for step in steps[:-1]:
            path += "/" + step
            around = resolve(self.root, f"#{path}")
            if isinstance(around, dict) and self._identifies(around):
                schema = None
        if not steps or not isinstance(schema, (dict, bool)):
            raise refuse(at, f"a reference to '{target[:200]}' cannot be enforced")
        return schema

    def _check_min_properties(self, schema: dict[str, Json], at: str) -> None:
        """Refuses `minProperties` unless required names satisfy it.

        A document may write an unlisted name twice, which counts once, so counting is not exact.
        """
        least = schema.get("minProperties", 0)
        if least > 1 and least > len(set(schema.get("required", ()))):
            raise refuse(
                _within(at, "minProperties"),
                "more than 1 can be enforced only where as many are 'required'",
            )


def _exactly_one(options: list[Json]) -> list[Json] | None:
    """Rewrites options that only require names into options that exclude each other.

    Returns None for other options, or if the result had too many.
    """
    names: list[list[str]] = []
    for option in options:
        words = option.keys() - ANNOTATIONS if isinstance(option, dict) else None
        if words != {"required"} or not option["required"]:
            return None
        names.append(option["required"])
    found: list[Json] = []
    for i, needed in enumerate(names):
        # For each other option, one of its names must be absent.
        others = [
            [name for name in other if name not in needed]
            for j, other in enumerate(names)
            if j != i
        ]
        if math.prod(map(len, others)) > _MOST_OPTIONS:
            return None
        found += [
            {
                "type": "object",  # other types match all options, and so not exactly one
                "required": needed,
                "properties": dict.fromkeys(missing, False),
            }
            for missing in product(*others)
        ]
    return found if 0 < len(found) <= _MOST_OPTIONS else None


def _closed(option: Json) -> Json:
    """Returns an object's schema with unlisted properties forbidden. `bounded.py` forbids them
    anyway."""
    if not isinstance(option, dict) or not option.get("properties"):
        return option
    if option.keys() & (_OF_OBJECTS - {"properties", "required"}):
        return option
    if set(option.get("required") or ()) - option["properties"].keys():
        return option
    return {**option, "additionalProperties": False}


def _whole_numbers(value: Json) -> Json:
    """Returns a value with 1.0 replaced by 1. Both are equal, but only 1 is written as an
    integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return value


def _distinct(items: Json, least: Json, most: Json) -> list[list[Json]] | None:
    """Returns all arrays of `least` to `most` distinct values of an enumeration, in every order.

    Returns None if `items` is no enumeration, or there are too many arrays.
    """
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
    **dict.fromkeys(("int64", "int"), (-EXACT, EXACT)),
    **dict.fromkeys(("uint64", "uint"), (0, EXACT)),
}
"""Maps OpenAPI's formats of numbers to bounds that keep numbers within them."""

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
    "$anchor": _Reader.anchor,
    "$id": _Reader.identifier_of,
    "id": _Reader.identifier_of,
    "$ref": _Reader.reference,
    "$schema": _Reader.dialect,
    "additionalItems": _Reader.subschema,
    "additionalProperties": _Reader.subschema,
    "const": _Reader.constant,
    "contentEncoding": _Reader.encoding,
    "contentMediaType": _Reader.media_type,
    **dict.fromkeys(
        ("dependencies", "dependentRequired", "dependentSchemas"), _Reader.dependent_names
    ),
    "enum": _Reader.enumeration,
    "format": _Reader.format,
    "items": _Reader.items,
    "not": _Reader.negation,
    "nullable": _Reader.nullable,
    "oneOf": _Reader.one_of,
    "pattern": _Reader.pattern,
    "patternProperties": _Reader.by_pattern,
    "prefixItems": _Reader.prefix,
    "properties": _Reader.own,
    "propertyNames": _Reader.property_names,
    "required": _Reader.names,
    "type": _Reader.typed,
    "uniqueItems": _Reader.unique,
    _X_GUIDANCE: _Reader.option,
}
"""The method that reads each keyword."""
