"""Every keyword: valid documents can be generated and invalid ones cannot; other keywords are
refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.errors import GrammarError
from quire.features.structured_output.compiler import Compiler
from quire.grammar.grammar import compilable
from quire.grammar.json_schema import enforceable
from quire.sampling_params import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from tests.features.structured_output.conftest import EOS, Accepts, of_schema

STR, INT, ANY = {"type": "string"}, {"type": "integer"}, {"type": "object"}
CLOSED = {"type": "object", "additionalProperties": False}
TREE = {
    "$defs": {
        "node": CLOSED
        | {
            "properties": {
                "v": INT,
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/node",
}


def tagged(tag: str, **properties: Any) -> dict[str, Any]:
    return CLOSED | {
        "properties": {"kind": {"const": tag}, **properties},
        "required": ["kind", *properties],
    }


# name, schema, documents that must be accepted, documents that must not.
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("true", True, ["1", '"a"', "[]", '{"a": null}'], ["", "a", "{", "1 2", "nul"]),
    ("type null", {"type": "null"}, ["null"], ["0", '"null"', "false"]),
    ("type boolean", {"type": "boolean"}, ["true", "false"], ["1", '"true"', "True"]),
    ("type integer", INT, ["0", "-3", "120"], ["1.5", "01", "+1", "1e2", '"1"', "--1", "-"]),
    ("type number", {"type": "number"}, ["0", "-1.5", "0.000000001"], ["2e3", "0.0000000001", "01", ".5", "1.", "NaN", '"1"']),
    ("type string", STR, ['""', '"a\\n\\"b"', '"é😀"'], ["a", "'a'", '"\n"', '"\\x"', '"a']),
    ("type array", {"type": "array"}, ["[]", "[1, [2]]"], ["{}", "[1,]", "[,1]", "[1 2]"]),
    ("type object", ANY, ["{}", '{"a": {"b": []}}'], ["[]", '{"a"}', '{"a":1,}', "{a:1}"]),
    ("type list", {"type": ["integer", "null"]}, ["1", "null"], ['"1"', "1.5", "true"]),
    ("enum", {"enum": ["a", 2, None, {"b": [1]}]},
     ['"a"', "2", "null", '{"b": [1]}'], ['"b"', "3", "false", '{"b": [2]}', "{}"]),
    ("const", {"const": "x/\"y"}, ['"x/\\"y"'], ['"x"', "null"]),
    ("const number", {"const": 1.5}, ["1.5"], ["1", "1.25", "15"]),
    ("const null", {"const": None}, ["null"], ["0", '""']),
    ("minimum", INT | {"minimum": -2}, ["-2", "0", "99999"], ["-3", "-20"]),
    ("maximum", INT | {"maximum": 17}, ["17", "-5000", "9"], ["18", "100"]),
    ("exclusive", INT | {"exclusiveMinimum": 1, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
    ("exclusive in draft 4", INT | {"$schema": "http://json-schema.org/draft-04/schema#",
                                    "minimum": 1, "exclusiveMinimum": True,
                                    "maximum": 4, "exclusiveMaximum": False},
     ["2", "4"], ["1", "5"]),
    ("number range", {"type": "number", "minimum": 0.5, "maximum": 1.5},
     ["0.5", "1", "1.25", "1.5"], ["0.4", "0", "1.51", "2", "-1", "10"]),
    ("number exclusive", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
     ["0.1", "0.99"], ["0", "1", "0.0", "1.0", "-0.5"]),
    ("multipleOf", INT | {"multipleOf": 3}, ["0", "9", "-3", "12"], ["1", "10", "-4"]),
    ("bounds leave others", {"minimum": 5}, ["5", '"a"', "null"], ["4", "4.9"]),
    ("minLength", STR | {"minLength": 2}, ['"ab"', '"é😀"', '"\\n\\n"'], ['""', '"a"', '"😀"', '"\\n"']),
    ("maxLength", STR | {"maxLength": 2}, ['""', '"ab"', '"😀😀"', '"\\n\\n"'], ['"abc"', '"\\n\\n\\n"']),
    ("pattern", STR | {"pattern": "^a+b?$"}, ['"a"', '"aab"'], ['""', '"b"', '"abb"', '"ca"']),
    ("pattern searches", STR | {"pattern": "b"}, ['"b"', '"abc"'], ['"a"', '""']),
    ("pattern dot", STR | {"pattern": "^.$"}, ['"a"', '"😀"'], ['"\\n"', '"\\r"', '"ab"']),
    ("pattern classes", STR | {"pattern": r"^[\w-]+\.\d{2,3}$"}, ['"a-b.12"'], ['"a.1"', '"a.1234"']),
    ("pattern of control characters", STR | {"pattern": r"^a[\x00-\x1f]b$"}, ['"a\\nb"'],
     ['"ab"', '"a\\u0001b"', '"a\x01b"']),
    ("pattern without control characters", STR | {"pattern": r"^[^\x00-\x1f]$"}, ['"a"', '"é"'],
     ['"\\n"', '""']),
    ("pattern and lengths", STR | {"pattern": "^a*$", "minLength": 1, "maxLength": 3},
     ['"a"', '"aaa"'], ['""', '"aaaa"', '"b"']),
    ("format with pattern", STR | {"format": "date", "pattern": "^2"}, ['"2024-02-29"'],
     ['"1999-01-01"', '"2023-02-29"', '"2x"']),
    ("items", {"type": "array", "items": INT}, ["[]", "[1, 2]"], ['["a"]', "[1.5]", "[1, null]"]),
    ("items false", {"type": "array", "items": False}, ["[]"], ["[1]"]),
    ("prefixItems", {"type": "array", "prefixItems": [INT, STR], "items": False},
     ["[]", "[1]", '[1, "a"]'], ['["a"]', '[1, "a", 2]', "[1, 2]"]),
    ("items as list", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
                       "items": [INT], "additionalItems": STR},
     ["[]", "[1]", '[1, "a"]'], ['["a"]', "[1, 2]"]),
    ("additionalItems alone", {"type": "array", "items": INT, "additionalItems": False},
     ["[1, 2]"], ['["a"]']),
    ("minItems", {"type": "array", "items": INT, "minItems": 2}, ["[1, 2]", "[1,2,3]"], ["[]", "[1]"]),
    ("maxItems", {"type": "array", "items": INT, "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    ("properties close an object", ANY | {"properties": {"a": INT}}, ["{}", '{"a": 1}'],
     ['{"b": 1}', '{"a": 1, "b": 1}', '{"a": 1, "a": 1}']),
    ("required closes", ANY | {"properties": {"a": INT}, "required": ["z"]}, ['{"z": [1]}'],
     ['{"z": 1, "y": 1}', "{}"]),
    ("patterns close", ANY | {"patternProperties": {"^n_": INT}}, ['{"n_1": 1}'], ['{"m": 1}']),
    ("parts of a whole stay open",
     {"$defs": {"A": ANY | {"properties": {"a": INT}, "required": ["a"]}, "B": {"$ref": "#/$defs/A"}},
      "allOf": [{"$ref": "#/$defs/B"}, {"properties": {"b": STR}, "required": ["b"]}]},
     ['{"a": 1, "b": "x"}'], ['{"a": 1}', '{"b": "x"}']),
    ("one part alone is closed", {"$defs": {"A": ANY | {"properties": {"a": INT}}},
                                  "allOf": [{"$ref": "#/$defs/A"}]}, ['{"a": 1}'], ['{"b": 1}']),
    ("options are closed", {"anyOf": [ANY | {"properties": {"a": INT}}, INT]}, ['{"a": 1}', "1"],
     ['{"b": 1}']),
    ("integers are bounded", INT, [str(2**53), str(-(2**53))], [str(2**53 + 1), "1" * 17]),
    ("numbers are bounded", {"minimum": 0}, ["1.5", '"a"'], ["0." + "1" * 10, "1" * 17, "1e5"]),
    ("open numbers", {"type": "number", "x-guidance": {"open_numbers": True}},
     ["1e300", "0." + "1" * 30], ['"a"']),
    ("any document is bounded", True, ["[[[[[[1]]]]]]", '{"a": {"b": [{}]}}'],
     ["[[[[[[[1]]]]]]]", "1" * 17, "[1e5]"]),
    ("any property is bounded", ANY | {"properties": {"a": True}, "required": ["a"]},
     ['{"a": {"b": [1.5]}}'], ['{"a": 1e5}']),
    ("any item is bounded", {"type": "array"}, ["[1, [null]]"], ["[1e5]", "[[[[[[[1]]]]]]]"]),
    ("draft 4 id", INT | {"id": "x", "$schema": "http://json-schema.org/draft-04/schema#"}, ["1"], ["null"]),
    ("$schema without a draft", {"$schema": "http://json-schema.org/schema#", "prefixItems": [INT]},
     ["[1]"], ['["a"]']),
    ("editors' annotations", INT | {"markdownDescription": "x", "externalDocs": {"url": "x"},
                                    "xml": {}, "enumDescriptions": ["a"]}, ["1"], ["null"]),
    ("OpenAPI's integers", INT | {"format": "int32"}, ["2147483647", "-2147483648"], ["2147483648"]),
    ("OpenAPI's long integers", INT | {"format": "int64"}, [str(2**53)], [str(2**53 + 1), "1.5"]),
    ("OpenAPI's numbers", {"type": "number", "format": "double"}, ["1.5"], ['"a"']),
    ("OpenAPI's bytes", STR | {"format": "byte"}, ['""', '"YQ=="', '"YWFh"'], ['"Y"', '"YQ="']),
    ("path and binary", {"anyOf": [STR | {"format": "path"}, STR | {"format": "binary"}]},
     ['"/a"'], ["1"]),
    ("1.0 is an integer", INT | {"enum": [1.0, 2]}, ["1", "2"], ["3"]),
    ("1.0 in a constant", {"const": {"a": [1.0]}}, ['{"a": [1]}'], ['{"a": [2]}']),
    ("uniqueItems of few", {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}},
     ["[]", '["b"]', '["c", "a", "b"]'], ['["a", "a"]', '["a", "b", "a"]', '["d"]']),
    ("uniqueItems and counts", {"uniqueItems": True, "minItems": 2, "maxItems": 2,
                                "$defs": {"e": {"type": "string", "enum": ["a", "b", "c"]}},
                                "items": {"$ref": "#/$defs/e"}},
     ['["c", "b"]', "1"], ['["a", "a"]', '["a"]', '["a", "b", "c"]']),
    ("uniqueItems of six", {"type": "array", "uniqueItems": True, "minItems": 1,
                            "items": {"enum": ["a", "b", "c", "d", "e", "f"]}},
     ['["f", "e", "d", "c", "b", "a"]', '["b"]'], ["[]", '["a", "b", "c", "d", "e", "a"]', "1"]),
    ("uniqueItems of integers", {"type": "array", "uniqueItems": True,
                                 "items": {"type": "integer", "enum": [1, 2, "a"]}},
     ["[2, 1]", "[]"], ["[1, 1]", '["a"]']),
    ("uniqueItems of one", {"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[5]"], ["[1, 2]"]),
    ("lenient", {"x-guidance": {"lenient": True}, "type": "array", "items": INT, "uniqueItems": True,
                 "not": {"maxItems": 1}}, ["[1, 2]"], ['["a"]']),
    ("properties of an open object",
     ANY | {"properties": {"a": INT, "b": STR}, "x-guidance": {"open_objects": True}},
     ["{}", '{"a": 1}', '{"a": 1, "b": "x", "c": []}'],
     ['{"a": "x"}', '{"b": 1}', '{"a": 1, "\\u0061": "x"}', '{"\\u0061": "x"}', '{"a":1,"a":"x"}']),
    ("required", ANY | {"required": ["z"], "properties": {"a": INT}},
     ['{"z": 1}', '{"a": 1, "z": 1}'], ["{}", '{"a": 1}', '{"y": 1}']),
    ("additionalProperties false", CLOSED | {"properties": {"a": INT}}, ["{}", '{"a": 1}'],
     ['{"b": 1}', '{"a": 1, "b": 2}', '{"a ": 1}']),
    ("additionalProperties schema", ANY | {"properties": {"a": STR}, "additionalProperties": INT},
     ['{"a": "x", "b": 1}', '{"b": 1}'], ['{"a": 1}', '{"b": "x"}', '{"\\u0061": 1}']),
    ("patternProperties", CLOSED | {"patternProperties": {"^n_": INT}},
     ["{}", '{"n_1": 1, "n_2": 2}'], ['{"n_1": "x"}', '{"m": 1}', '{"\\u006e_1": "x"}']),
    ("minProperties", ANY | {"minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ("maxProperties", ANY | {"maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
    ("names to be escaped", CLOSED | {"properties": {'q"/\t': INT}, "required": ['q"/\t']},
     ['{"q\\"/\\t": 1}'], ["{}", '{"q": 1}']),
    ("anyOf", {"anyOf": [INT, STR | {"maxLength": 1}]}, ["1", '"a"'], ['"ab"', "1.5", "null"]),
    ("anyOf beside", INT | {"anyOf": [{"minimum": 5}, {"maximum": 2}]}, ["5", "2"], ["3", '"a"']),
    ("allOf", {"allOf": [INT, {"minimum": 2}, {"maximum": 4}]}, ["2", "4"], ["1", "5", '"a"']),
    ("allOf objects", {"allOf": [ANY | {"properties": {"a": INT}, "required": ["a"]},
                                 ANY | {"properties": {"b": STR}, "required": ["b"]}]},
     ['{"a": 1, "b": "x"}'], ['{"a": 1}', '{"a": "x", "b": "x"}', "{}"]),
    ("oneOf types", {"oneOf": [INT, STR]}, ["1", '"a"'], ["null", "1.5"]),
    ("oneOf tags", {"oneOf": [tagged("a", x=INT), tagged("b", y=STR)]},
     ['{"kind": "a", "x": 1}', '{"kind": "b", "y": "z"}'],
     ['{"kind": "a", "y": "z"}', '{"kind": "c"}', '{"kind": "b", "x": 1}']),
    ("oneOf tags by reference", {"$defs": {"A": tagged("a"), "B": tagged("b")},
                                 "discriminator": {"propertyName": "kind"},
                                 "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
     ['{"kind": "a"}', '{"kind": "b"}'], ['{"kind": "c"}', "{}"]),
    ("$ref", TREE, ['{"v": 1}', '{"v": 1, "kids": [{"v": 2, "kids": []}]}'],
     ["{}", '{"v": 1, "kids": [{}]}', '{"v": 1, "kids": [{"v": "x"}]}']),
    ("$ref to the root", ANY | {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
     ["{}", '{"next": {"next": {}}}'], ['{"next": 1}', '{"next": {"x": {}}}']),
    ("$ref beside", {"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 3}, ["3"], ["2", '"a"']),
    ("$ref with escapes", {"$defs": {"a/b~c%": INT}, "$ref": "#/$defs/a~1b~0c%25"}, ["3"], ['"a"']),
    ("$ref into properties", {"properties": {"a": INT, "b": {"$ref": "#/properties/a"}},
                              "type": "object", "additionalProperties": False},
     ['{"b": 1}'], ['{"b": "x"}']),
    ("$ref into allOf", {"format": "date", "allOf": [STR, {"minLength": 1}],
                         "$defs": {"s": {"$ref": "#/allOf/0"}}}, ['"2020-01-01"'], ["1", '"x"']),
    ("$anchor", {"$defs": {"n": INT | {"$anchor": "num"}}, "$ref": "#num"}, ["3"], ['"a"']),
    ("definitions", {"definitions": {"n": INT}, "$ref": "#/definitions/n"}, ["3"], ['"a"']),
    ("annotations", INT | {"title": "t", "description": "d", "default": "x", "examples": ["y"],
                           "deprecated": True, "readOnly": True, "writeOnly": False,
                           "$comment": "c", "x-own": 1, "$id": "https://example.com/s",
                           "$schema": "https://json-schema.org/draft/2020-12/schema"},
     ["1"], ['"x"', '"y"']),
    ("words of one's own", INT | {"readonly": True, "self": {"vendor": "x"}, "pbj": 1, "note": "n",
                                  "optional": True, "types": {"a": {}}, "ref": "User",
                                  "format": "topic", "$type": "Thing"}, ["1"], ["null"]),
    ("labels of an own document", {"$schema": "http://iglucentral.com/schemas/com.snowplowanalytics."
                                   "self-desc/schema/jsonschema/1-0-0#", "self": {"name": "x"},
                                   "type": "integer"}, ["1"], ["null"]),
    ("ids below the root", ANY | {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": INT | {"$id": "#/properties/a"},
                                                 "b": STR | {"id": "b"}}, "required": ["a"]},
     ['{"a": 1, "b": "x"}'], ['{"a": "x"}']),
    ("$ref below a word of one's own", {"types": {"a": {"type": "array", "items": {"$ref": "#/types/b"}},
                                                  "b": INT}, "$ref": "#/types/a"},
     ["[1]"], ['["a"]', "1"]),
    ("$ref to the whole name", {"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/a<b>",
                                "$defs": {"a<b>": INT}}, ["1"], ["null"]),
    ("bounds of a double", {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["1.5"], ['"a"']),
    ("not required", ANY | {"properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}},
     ["{}", '{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}', "1"]),
    ("not required of any type", {"not": {"required": ["a"]}}, ['{"b": 1}'], ['{"a": 1}', "1"]),
    ("not a type", {"not": {"type": ["string", "null"]}}, ["1", "[]"], ['"a"', "null"]),
    ("never", ANY | {"properties": {"a": INT, "b": {"not": {}}}}, ['{"a": 1}', "{}"], ['{"b": 1}']),
    ("never an item", {"type": "array", "items": {"not": {}}}, ["[]"], ["[1]"]),
    ("names of any text", ANY | {"propertyNames": STR, "additionalProperties": INT},
     ["{}", '{"x y": 1}'], ['{"a": "b"}']),
    ("names by pattern", ANY | {"propertyNames": {"pattern": "^a+$"}, "additionalProperties": INT},
     ["{}", '{"aa": 1}'], ['{"b": 1}', '{"aa": "x"}']),
    ("names by pattern and properties", ANY | {"propertyNames": {"pattern": "^a+$"},
                                               "properties": {"a": STR, "b": STR}},
     ['{"a": "x"}', '{"aa": 1}'], ['{"b": "x"}', '{"a": 1}']),
    ("names by enum", ANY | {"propertyNames": STR | {"enum": ["a", "b"]}, "additionalProperties": INT,
                             "required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ['{"b": 1}', '{"a": 1, "c": 1}']),
    ("names by length", ANY | {"propertyNames": {"minLength": 2}}, ['{"ab": 1}'], ['{"a": 1}']),
    ("names by reference", ANY | {"$defs": {"n": STR | {"pattern": "^x"}}, "propertyNames": {"$ref": "#/$defs/n"}},
     ['{"x1": 1}'], ['{"y": 1}']),
    ("no names", {"propertyNames": False}, ["{}", "1"], ['{"a": 1}']),
    ("dependencies", ANY | {"properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
     ["{}", '{"b": 1}', '{"a": 1, "b": 1}'], ['{"a": 1}']),
    ("dependent schemas", ANY | {"properties": {"a": INT, "b": INT},
                                 "dependencies": {"a": {"properties": {"b": {"minimum": 5}}}}},
     ['{"b": 1}', '{"a": 1, "b": 5}'], ['{"a": 1, "b": 1}']),
    ("encodings", STR | {"contentEncoding": "base64", "contentMediaType": "image/png"},
     ['"YQ=="', '""'], ['"YQ="', '"Y"', '"YR=="']),
    ("base64url", STR | {"format": "base64url"}, ['"YQ"', '"_-8"', '""'], ['"YQ=="', '"Y"', '"+/8"']),
    ("lookahead that must match", STR | {"pattern": r"^(?=.*[A-Z])(?=.*\d).{3,5}$"},
     ['"aB1"', '"1B23"'], ['"ab1"', '"aBc"', '"aB1234"']),
    ("lookahead that a format implies", STR | {"format": "email", "pattern":
     r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"},
     ['"a.b@c.de"'], ['"a..b@c.de"', '".a@c.de"', '"a@b"']),
    ("one of two names", ANY | {"properties": {"a": INT, "b": INT}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', "{}"]),
    ("one of two names of any type", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a": 1}'], ["1", '{"a": 1, "b": 1}']),
    ("oneOf by needed properties", {"oneOf": [ANY | {"properties": {"a": INT}, "required": ["a"]},
                                              ANY | {"properties": {"b": INT}, "required": ["b"]}]},
     ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', "{}"]),
    ("oneOf by values and types", {"oneOf": [{"enum": [False, "x"]}, ANY, STR | {"pattern": r"^\d+$"}]},
     ["false", '"x"', "{}", '"12"'], ["true", '"y"']),
    ("oneOf by patterns", {"oneOf": [STR | {"pattern": "^[0-9]"}, STR | {"format": "uuid", "pattern": "^[a-f]"}]},
     ['"1.2"', '"aeb8aa08-aa98-11ea-b4aa-73b441d16380"'], ['"a"', '"/"']),
    ("oneOf by items", {"oneOf": [{"type": "array", "items": INT, "minItems": 1}, {"type": "array", "items": STR}]},
     ["[1]", '["a"]', "[]"], ['[1, "a"]']),
    ("anyOf beside properties", ANY | {"properties": {"a": INT, "b": INT}, "required": ["a"],
                                       "anyOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}]},
     ['{"a": 1}'], ["{}"]),
    ("uniqueItems false", {"type": "array", "uniqueItems": False, "items": INT}, ["[1, 1]"], ["[null]"]),
    ("compact", ANY | {"x-guidance": {"whitespace_flexible": False}, "properties": {"a": INT},
                       "additionalProperties": False}, ['{"a":1}'], ['{"a": 1}', '{ }']),
    ("white space is bounded", ANY, ["{  }", "{\n" + " " * 32 + "}", "{\r\n}"],
     ["{   }", "{\n" + " " * 33 + "}", "{\n\n}", " {}", "{} "]),
]  # fmt: skip

FORMATS: list[tuple[str, list[str], list[str]]] = [
    ("date", ["2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01", "0400-02-29"],
     ["0000-01-01", "0000-02-29", "02024-01-01", "2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-1-1", "2024-01-01T00:00:00Z"]),
    ("time", ["00:00:00Z", "23:59:59.123+05:30", "12:00:00z", "12:00:00.123456789Z"],
     ["12:00:00.1234567890Z", "24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00+24:00", "1:00:00Z"]),
    ("date-time", ["2024-02-29T12:00:00Z", "1985-04-12t23:20:50.52-01:00"],
     ["2023-02-29T12:00:00Z", "2024-01-01", "2024-01-01 00:00:00Z", "2024-01-01T24:00:00Z"]),
    ("duration", ["P1Y2M3DT4H5M6S", "PT5M", "P4W", "P1M", "P12345D"], ["P123456D", "PT123456S", "P", "PT", "P1S", "1Y", "P1W2D", "P1YT"]),
    ("email", ["a@b", "a.b+c@x-y.example", "a" * 64 + "@b", "a.b" * 8 + "@b"],
     ["a" * 65 + "@b", ".".join("a" * 33) + "@b", "a", "@b", "a@", "a..b@c", ".a@b", "a@-b", "a@b..c", "a b@c", "a@b-"]),
    ("hostname", ["a", "a-b.example", "a" * 63, "a--b"],
     ["", "-a", "a-", "a..b", "a_b", "a" * 64, "xn--x", ".a", "a.", ".".join(["a" * 60] * 5)]),
    ("ipv4", ["0.0.0.0", "255.249.199.9"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    ("ipv6", ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2", "1:2:3:4:5:6:7::"],
     [":", ":::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "12345::", "::1:2:3:4:5:6:7:8",
      "1:2:3:4:5:6:7::8:9", "1:2:3:4:5:6:7:", "g::"]),
    ("uri", ["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b", "https://[::1]:80/", "a:"],
     ["a", "//a", "/a", "http://a b", "http://a/%zz", "1a:b", "http://[::1", "http://a:b/"]),
    ("json-pointer", ["", "/a/~0~1", "//"], ["a", "/~2", "/~"]),
    ("relative-json-pointer", ["0", "12#", "1/a"], ["", "01", "a"]),
    ("uri-template", ["", "http://a/{b}{?c,d*}{e:3}", "x"], ["{", "{}", "a b", "}", "{a"]),
    ("regex", ["^a+b?$", r"\d[a-z0-9]*".replace("a-z0-9", "ab"), "x.y"], ["(", "[", "*", "a**", "[b-a]"]),
    ("uuid", ["2eb8aa08-AA98-11ea-b4aa-73b441d16380"],
     ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638",
      "2eb8aa08-aa98-11ea-b4ga-73b441d16380"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_keyword(accepts: Accepts, schema: Any, valid: list[str], invalid: list[str]) -> None:
    params = of_schema(schema)
    for text in valid:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(params, text), text
    for text in invalid:
        assert not accepts(params, text), text


@pytest.mark.parametrize(("name", "valid", "invalid"), FORMATS, ids=[f[0] for f in FORMATS])
def test_format(accepts: Accepts, name: str, valid: list[str], invalid: list[str]) -> None:
    params = of_schema(STR | {"format": name})
    for text in valid:
        assert accepts(params, json.dumps(text)), text
    for text in invalid:
        assert not accepts(params, json.dumps(text)), text
    other = of_schema({"format": name})
    assert accepts(other, "12")
    assert not accepts(other, json.dumps(invalid[-1]))


REFUSED: list[tuple[str, Any, str]] = [
    *((name, {"properties": {"a": {name: value}}}, f"#/properties/a/{name}") for name, value in {
        "not": {"const": 1}, "if": {}, "then": {}, "else": {}, "contains": {}, "minContains": 1,
        "maxContains": 1, "uniqueItems": True, "propertyNames": {"anyOf": [{}]},
        "unevaluatedItems": False, "unevaluatedProperties": False,
        "contentEncoding": "quoted-printable", "contentMediaType": "application/json",
        "contentSchema": {}, "$dynamicRef": "#a", "$dynamicAnchor": "a", "$recursiveRef": "#",
        "$recursiveAnchor": True, "$vocabulary": {}, "nullable": True, "disallow": "string",
        "formatMaximum": "2020-01-01", "format": "datetime",
        "$schema": "http://json-schema.org/draft-07/schema#", "x-guidance": {},
        # misspelled
        "maxLenght": 3, "additonalProperties": False, "Required": ["a"], "one_of": [INT],
        "types": "string", "enums": [1], "ref": "#/definitions/a", "minitems": 2,
    }.items()),
    ("uniqueItems of many", {"items": {"enum": list("abcdefgh")}, "uniqueItems": True}, "#/uniqueItems"),
    ("uniqueItems of numbers", {"items": {"enum": [1, 1.0]}, "uniqueItems": True}, "#/uniqueItems"),
    ("uniqueItems of what else", {"items": {"enum": ["a"], "maxLength": 0}, "uniqueItems": True},
     "#/uniqueItems"),
    ("nullable without a type", {"nullable": True, "anyOf": [INT]}, "#/nullable"),
    ("$ref below an id", {"items": {"$id": "a", "items": {"$ref": "#/$defs/b"}}, "$defs": {"b": INT}},
     "#/items/items/$ref"),
    ("required in a property", {"properties": {"a": {"required": True}}}, "#/properties/a/required"),
    ("not of two words", {"not": {"type": "object", "minProperties": 1}}, "#/not"),
    ("not an integer", {"not": {"type": "integer"}}, "#/not"),
    ("nothing", {"not": {}}, "#"),
    ("two rules for names", {"propertyNames": {"format": "uuid", "pattern": "a"}}, "#/propertyNames"),
    ("lookahead that excludes", {"pattern": "^(?!a).*$"}, "#/pattern"),
    ("lookahead of an option", {"pattern": "^(?=a).*$|^b"}, "#/pattern"),
    ("lookahead that excludes in a format", {"format": "email", "pattern": "^(?!a).*$"}, "#/pattern"),
    ("repeats in repeats", {"pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}, "#/pattern"),
    ("counted repeats in repeats", {"pattern": "^(.{0,10}[aeiou].{0,10}){0,40}$"}, "#/pattern"),
    ("options of other lengths in repeats", {"pattern": "^(a|bc){0,99}$"}, "#/pattern"),
    ("id that is no string", {"id": 5}, "#/id"),
    ("$schema of no draft", {"$schema": "http://json-schema.org/draft-03/schema#"}, "#/$schema"),
    ("format that is no text", {"format": 5}, "#/format"),
    ("format of another case", {"format": "Date-Time"}, "#/format"),
    ("other dialect", {"$schema": "https://example.com/mine"}, "#/$schema"),
    ("coerced", {"x-guidance": {"coerce_one_of": True}}, "#/x-guidance/coerce_one_of"),
    ("separator", {"x-guidance": {"item_separator": ";"}}, "#/x-guidance/item_separator"),
    ("remote $ref", {"$ref": "https://example.com/s"}, "#/$ref"),
    ("$ref to nothing", {"$ref": "#/$defs/a"}, "#/$ref"),
    ("$ref to what is no schema", {"default": 5, "$ref": "#/default"}, "#/$ref"),
    ("$ref to what is refused", {"default": {"items": {"if": {}}}, "$ref": "#/default"}, "#/default/items/if"),
    ("$ref into oneOf", {"oneOf": [INT, STR], "$defs": {"a": {"$ref": "#/oneOf/0"}}}, "#/$defs/a/$ref"),
    ("oneOf that overlaps", {"oneOf": [STR, STR | {"maxLength": 2}]}, "#/oneOf"),
    ("oneOf of integer and number", {"oneOf": [INT, {"type": "number"}]}, "#/oneOf"),
    ("oneOf with equal tags", {"oneOf": [tagged("a"), {**tagged("a", x=INT), "required": ["kind"]}]}, "#/oneOf"),
    ("oneOf of optional properties", {"oneOf": [ANY | {"properties": {"a": INT}}, ANY | {"properties": {"b": INT}}]},
     "#/oneOf"),
    ("oneOf of patterns that overlap", {"oneOf": [STR | {"pattern": "^a"}, STR | {"pattern": "b$"}]}, "#/oneOf"),
    ("oneOf that may be null twice", {"oneOf": [STR | {"nullable": True}, {"type": "null"}]}, "#/oneOf"),
    ("oneOf of empty arrays", {"oneOf": [{"type": "array", "items": INT}, {"type": "array", "items": STR}]}, "#/oneOf"),
    ("oneOf of equal constants", {"oneOf": [{"const": 1}, {"const": 1.0}]}, "#/oneOf"),
    ("minProperties", {"type": "object", "minProperties": 2}, "#/minProperties"),
    ("prefixItems before its time",
     {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [INT]}, "#/prefixItems"),
    ("large bound", {"minimum": 2**53 + 1}, "#/minimum"),
    ("boolean bound", {"maximum": 1, "exclusiveMinimum": True}, "#/exclusiveMinimum"),
    ("large constant", {"const": [2**53 + 1]}, "#/const/0"),
    ("multipleOf 0", {"multipleOf": 0}, "#/multipleOf"),
    ("negative count", {"minLength": -1}, "#/minLength"),
    ("lookahead", {"pattern": "(?=a)"}, "#/pattern"),
    ("lookahead in a name", {"patternProperties": {"a/(?!b)": {}}},
     "#/patternProperties/a~1(?!b)"),
    ("unknown type", {"type": "strnig"}, "#/type"),
    ("empty enum", {"enum": []}, "#/enum"),
    ("empty anyOf", {"anyOf": []}, "#/anyOf"),
    ("no schema", {"properties": {"a": 1}}, "#/properties/a"),
    ("false", False, "#"),
    ("control character in a constant", {"const": {"a": "b\0"}}, "#/const/a"),
    ("control character in a value", {"enum": ["\x7f"]}, "#/enum/0"),
    ("control character in a name", {"properties": {"a\x1f": {}}}, "#/properties/a\x1f"),
    ("control character that is required", {"required": ["a\x01"]}, "#/required/0"),
    ("control character in a pattern", {"pattern": r"a\x01"}, "#/pattern"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "pointer"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_an_unenforceable_keyword_is_refused_by_its_pointer(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        enforceable(schema)
    assert caught.value.pointer == pointer
    assert f"'{pointer}'" in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "word"),
    [({"additonalProperties": False}, "additionalProperties"), ({"Required": ["a"]}, "required"),
     ({"type": "string", "format": "date_time"}, "date-time"), ({"itmes": {}}, "items")],
)  # fmt: skip
def test_a_misspelled_keyword_gets_a_suggestion(schema: Any, word: str) -> None:
    with pytest.raises(GrammarError, match=f"'{word}' may be meant"):
        enforceable(schema)


def test_regular_expressions_that_an_answer_could_die_of_are_refused() -> None:
    with pytest.raises(GrammarError, match="varying length"):
        compilable(StructuredOutputsParams(regex=r"(.{0,10}[aeiou].{0,10}){0,40}"))
    compilable(StructuredOutputsParams(regex=r"(?i)\bx\b(a{1,3}){0,20}"))


@pytest.mark.parametrize("pattern", [r"^(.{0,5}[aeiou].{0,5}){0,11}$", r"^(?:\S+\s+){0,60}\S+$",
                                     r"^(.?.?.?[aeiou].?.?.?){0,18}$", r"^(.|..|...){0,20}x$"])  # fmt: skip
def test_random_walks_through_accepted_patterns(compiler: Compiler, pattern: str) -> None:
    grammar = compiler.compile(of_schema(STR | {"pattern": pattern})).result()
    for seed in range(4):
        draw, matcher = random.Random(seed), grammar.deep_copy()
        for _ in range(60):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            assert not matcher.is_error(), matcher.get_error()
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            rest = [token for token in allowed if token not in EOS]
            if not rest:
                break
            matcher.consume_token(draw.choice(rest))


def test_a_schema_of_many_described_references_is_small(compiler: Compiler) -> None:
    """Compiles a schema like JReleaser's, whose properties are references with a description."""
    definitions: dict[str, Any] = {"d80": INT}
    for i in range(80):
        both = {"allOf": [{"$ref": f"#/definitions/d{i + 1}"}, {"description": "old"}]}
        definitions[f"d{i}"] = CLOSED | {"properties": {"a": both, "b": both, "c": STR}}
    compiler.compile(of_schema({"$ref": "#/definitions/d0", "definitions": definitions})).result()


def test_schemas_in_grammars(accepts: Accepts) -> None:
    def of(schema: Any) -> StructuredOutputsParams:
        return StructuredOutputsParams(grammar=f'start: "x" %json {json.dumps(schema)} "y"')

    assert accepts(of(STR | {"format": "date"}), 'x"2024-02-29"y')
    assert not accepts(of(STR | {"format": "date"}), 'x"2023-02-29"y')
    with pytest.raises(GrammarError) as caught:
        compilable(of({"properties": {"a": {"if": {}}}}))
    assert caught.value.pointer == "#/properties/a/if"
    lenient = {
        "x-guidance": {"lenient": True, "whitespace_flexible": False, "item_separator": ", "},
        "type": "array",
        "uniqueItems": True,
        "items": {"oneOf": [INT, INT | {"minimum": 3}], "not": {"const": 1}},
    }
    assert accepts(of(lenient), "x[1, 2]y")
    assert not accepts(of(lenient), "x[1,2]y")
    assert not accepts(of(lenient), 'x["a"]y')


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {"  # %json {\n// %json {',
        "start: /%json x/",
        "start: <|im_start|> <|im_end|>",
        '%llguidance {}\nstart: "a" ["b"]',
        'root ::= "a" ("b" | "c")*',
    ],
)
def test_grammars_that_only_look_as_if_they_held_schemas(compiler: Compiler, text: str) -> None:
    compiler.compile(StructuredOutputsParams(grammar=text)).result()


@pytest.mark.parametrize(
    "text",
    ['start[temperature=0.5]: /a/', 'start[capture, stop="b"]: /a/', "start: %json {", "start: x",
     "root ::= (", "start: @other", "start: %json 5"],
)  # fmt: skip
def test_grammars_that_cannot_be_enforced(compiler: Compiler, text: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(StructuredOutputsParams(grammar=text)).result()


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(regex="a\ud800"),
        StructuredOutputsParams(json='{"const": "\\ud800"}'),
        StructuredOutputsParams(choice=("\udfff",)),
        StructuredOutputsParams(json='{"minimum": NaN}'),
        StructuredOutputsParams(json="[" * 100_000),
        StructuredOutputsParams(grammar="root ::= " + "(" * 10_000),
        StructuredOutputsParams(grammar="root ::= " + "a" * 70_000),
        StructuredOutputsParams(grammar='"' + '\\"' * 200_000),
        StructuredOutputsParams(grammar="[" * 400_000),
        StructuredOutputsParams(grammar="\n" * 400_000),
        StructuredOutputsParams(grammar="start: " + "<" * 400_000),
    ],
    ids=range(11),
)
def test_hostile_text(compiler: Compiler, params: StructuredOutputsParams) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(params).result()


def nested(depth: int) -> Any:
    schema: Any = INT
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(80),
        nested(100_000),
        {"properties": {f"p{i}": {} for i in range(6000)}},
        {"enum": list(range(30_000))},
        {"const": [[0] * 15_000] * 2},
    ],
    ids=["deep", "deeper than any parser", "properties", "values", "values of a constant"],
)
def test_size_limits(schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        enforceable(schema)
    assert caught.value.code == "schema_too_large"


def test_nullable_allows_null_and_its_type(accepts: Accepts) -> None:
    params = of_schema(CLOSED | {"properties": {"%41~/": INT | {"nullable": True}}})
    assert accepts(params, '{"%41~/": null}')
    assert not accepts(params, '{"%41~/": "a"}')
    assert not accepts(of_schema(INT | {"nullable": False}), "null")
    # As in OpenAPI 3.0.3, an enumeration without null stays one.
    assert not accepts(of_schema(STR | {"nullable": True, "enum": ["a"]}), "null")


def test_a_grammar_with_many_long_strings_lasts(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Each position of a string with a length is a state of the lexer."""
    names = [f"p{i}" for i in range(24)]
    schema = CLOSED | {
        "properties": {name: STR | {"maxLength": 3000 + i} for i, name in enumerate(names)},
        "required": names,
    }
    matcher = compiler.compile(of_schema(schema)).result().deep_copy()
    text = json.dumps(dict.fromkeys(names, "lorem ipsum " * 200))
    for token in tokenizer.encode(text, add_special_tokens=False).tolist():
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
