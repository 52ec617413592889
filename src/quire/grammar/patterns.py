"""JSON Schema's regular expressions, which are ECMAScript's, in the syntax of Rust's `regex`.

The two syntaxes look alike but differ: `.`, `\\s` and `\\w` match other sets, and `[a&&b]` and
`\\z` mean other things. So a pattern is parsed by ECMAScript's rules (ECMA-262, 22.2, Unicode mode
with the harmless escapes of Annex B) and translated. A pattern that Rust cannot express is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from quire.errors import GrammarError

MAX_WAYS = 128
"""Most characters of a bounded repeat, if the repeated part varies in length."""
_SPACE = (
    r"\t\n\x0B\x0C\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
    r"\u{FEFF}"
)
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NO_LINE_END = r"[^\n\r\u{2028}\u{2029}]"
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Intersected with sets, because llguidance would write no character for a set of unwritable ones.
_WRITABLE = r"&&[^\x00-\x07\x0B\x0E-\x1F\x7F]"
_REPEAT = re.compile(r"\{[0-9]{1,6}(?:,(?:[0-9]{1,6})?)?\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]{1,40}(?:=[A-Za-z_]{1,40})?\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]{0,99}>")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def rules_of(pattern: str, format: str | None) -> list[str]:
    """Returns expressions such that a string matches the pattern if it matches all of them.

    A lookahead at the start becomes its own expression. A negative lookahead is left out if no
    string that the other expressions allow can match it.

    Args:
        pattern: in ECMAScript's syntax.
        format: the format next to the pattern, which is enforced elsewhere, or None.

    Raises:
        GrammarError: the pattern cannot be enforced. The error has no pointer.
    """
    if pattern in _IMPLIED.get(format or "", ()):
        return []
    positive, negative, rest = _lookaheads(pattern)
    rules = [translate(rest), *map(translate, positive)]
    for excluded in negative:
        looser = _LOOSER.get(format or "", format_rules(format))
        if not contradict([*rules, *looser, translate(excluded)]):
            raise GrammarError("a negative lookahead cannot be enforced where it excludes strings")
    return rules


def check_repeats(pattern: str) -> None:
    """Raises GrammarError for a bounded repeat, in Rust's syntax, with too many ways to match.

    Constructs that ECMAScript does not have are not checked.
    """
    try:
        translate(pattern)
    except _TooManyWaysError:
        raise
    except GrammarError:
        return


def format_rules(format: str | None) -> list[str]:
    """Returns expressions such that a string has the format if it matches all of them."""
    return [f"^(?:{pattern})$" for pattern in FORMATS[format][0]] if format in FORMATS else []


def escape(text: str) -> str:
    """Returns an expression that matches exactly the text."""
    return "".join(_literal(ord(char)) for char in text)


def contradict(patterns: Sequence[str]) -> bool:
    """Returns whether it can be proved that no string matches all patterns."""
    schema = {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}
    why: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return why.startswith("Unsatisfiable schema: Regex is empty")


def _lookaheads(pattern: str) -> tuple[list[str], list[str], str]:
    """Splits off the lookaheads at the start of a pattern.

    Returns the patterns of positive lookaheads, those of negative ones, and the rest.
    """
    found: dict[str, list[str]] = {"(?=": [], "(?!": []}
    at = 1
    while pattern.startswith("^") and (kind := pattern[at : at + 3]) in found:
        end = next((i for i, _, depth in _marks(pattern, at) if depth == 0), -1)
        if end < 0:
            break
        inner = pattern[at + 3 : end]
        found[kind].append(f"^(?:{inner})" if _has_options(inner) else f"^{inner}")
        at = end + 1
    if at == 1 or _has_options(pattern[at:]):
        return [], [], pattern
    return found["(?="], found["(?!"], "^" + pattern[at:]


def _has_options(pattern: str) -> bool:
    return any(mark == "|" and not depth for _, mark, depth in _marks(pattern, 0))


def _marks(pattern: str, at: int) -> Iterator[tuple[int, str, int]]:
    """Yields the index and character of each '(', ')' and '|', and the number of open groups after
    it."""
    depth, in_class = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()|":
            depth += (char == "(") - (char == ")")
            yield at, char, depth
        at += 1


def translate(pattern: str) -> str:
    """Returns an ECMAScript pattern in Rust's syntax. Raises GrammarError, without a pointer, if it
    cannot be enforced."""
    return _Translator(pattern).run()


def unwritable(text: str) -> bool:
    """Returns whether JSON needs \\uXXXX to write the text, which the grammars do not allow."""
    return _UNWRITABLE.search(text) is not None


def _literal(code: int) -> str:
    char = chr(code)
    if unwritable(char):
        raise GrammarError(f"the control character U+{code:04X} cannot be enforced")
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:X}}}"


def _member(code: int) -> str:
    """Returns a character as it is written in a character class."""
    return f"\\u{{{code:X}}}"


class _TooManyWaysError(GrammarError):
    """A bounded repeat can match in too many ways."""


@dataclass
class _Ways:
    """The number of ways in which a part of a pattern can match.

    Attributes:
        places: characters in the part. A bounded repeat counts them as often as it may repeat.
        varies: whether the part matches texts of different lengths.
    """

    places: int = 0
    varies: bool = False


def _together(options: list[list[_Ways]]) -> _Ways:
    """Returns the ways to match a group with these alternatives."""
    places = [sum(part.places for part in option) for option in options]
    varies = any(part.varies for option in options for part in option)
    return _Ways(sum(places), varies or len(set(places)) > 1)


class _Translator:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.out: list[str] = []
        # For each open group, the alternatives read so far, each a list of parts.
        self.groups: list[list[list[_Ways]]] = [[[]]]

    def run(self) -> str:
        open_groups, repeatable = 0, False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "*+?{" and self._repeat(repeatable):
                repeatable = False
                continue
            self.at += 1
            repeatable = char not in "^$|("
            if char not in "^$|()":
                self.groups[-1][-1].append(_Ways(1))
            if char == "(":
                self._group()
                self.groups.append([[]])
                open_groups += 1
            elif char == ")":
                open_groups -= 1
                if open_groups < 0:
                    raise GrammarError("it has a ')' without a '('")
                self.out.append(")")
                whole = _together(self.groups.pop())
                self.groups[-1][-1].append(whole)
            elif char in "^$|":
                self.out.append(char)
                if char == "|":
                    self.groups[-1].append([])
            elif char == ".":
                self.out.append(f"[{_NO_LINE_END}{_WRITABLE}]")
            elif char == "[":
                self._class()
            elif char == "\\":
                self.out.append(self._escape())
            else:
                self.out.append(_literal(ord(char)))
        if open_groups:
            raise GrammarError("it has a '(' without a ')'")
        return "".join(self.out)

    def _repeat(self, repeatable: bool) -> bool:
        """Reads a quantifier, and returns whether there was one. Greediness is ignored, because it
        does not change which strings match."""
        found = _REPEAT.match(self.text, self.at)
        if found is None and self.text[self.at] == "{":
            raise GrammarError("it has a '{' that is no quantifier; write '\\{' for the character")
        if not repeatable:
            raise GrammarError(f"nothing to repeat at character {self.at}")
        quantifier = found.group() if found else self.text[self.at]
        self.at += len(quantifier)
        if self.text[self.at : self.at + 1] == "?":
            self.at += 1
        self.out.append(quantifier)
        self._repeated(self.groups[-1][-1][-1], quantifier)
        return True

    def _repeated(self, part: _Ways, quantifier: str) -> None:
        """Counts the ways to match a repeated part, and refuses too many.

        llguidance follows all ways to match a text at once. A part of varying length with a bounded
        repeat can have so many that the answer would fail.
        """
        counts = quantifier.strip("{}").split(",") if quantifier[0] == "{" else []
        if counts and counts[-1]:
            most = int(counts[-1])
            if part.varies and most > 1 and most * part.places > MAX_WAYS:
                raise _TooManyWaysError(
                    f"'{quantifier}' repeats a part of varying length with {part.places} places; "
                    f"times {most} they are more than {MAX_WAYS}"
                )
            part.places *= max(1, most)
        elif counts and int(counts[0]) > 1:
            self._repeated(part, f"{{{counts[0]}}}")
        part.varies = part.varies or len(counts) != 1

    def _group(self) -> None:
        rest = self.text[self.at : self.at + 120]
        named = _GROUP_NAME.match(rest)
        if named:
            self.at += named.end()
        elif rest.startswith("?:"):
            self.at += 2
        elif rest.startswith(("?=", "?!", "?<=", "?<!")):
            raise GrammarError("lookahead and lookbehind cannot be enforced")
        elif rest.startswith("?"):
            raise GrammarError(f"a group that begins with '({rest[:2]}' cannot be enforced")
        self.out.append("(?:")

    def _escape(self) -> str:
        """Reads an escape after its backslash, outside of a class."""
        char = self.text[self.at : self.at + 1]
        if char in _CLASSES:
            self.at += 1
            return f"[[{_CLASSES[char]}]{_WRITABLE}]"
        if char.lower() in _CLASSES and char:
            self.at += 1
            return f"[[^{_CLASSES[char.lower()]}]{_WRITABLE}]"
        if char in "bB" and char:
            raise GrammarError("word boundaries cannot be enforced")
        found = _PROPERTY.match(self.text, self.at)
        if found:
            self.at = found.end()
            return f"[\\{found.group()}{_WRITABLE}]"
        return _literal(self._code())

    def _code(self) -> int:
        """Returns the code point that an escape stands for."""
        char = self.text[self.at : self.at + 1]
        found = _HEX.match(self.text, self.at)
        if found:
            self.at = found.end()
            return self._whole(int(next(x for x in found.groups() if x is not None), 16))
        self.at += 1
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not self.text[self.at : self.at + 1].isdecimal():
            return 0
        if char == "c" and re.match("[A-Za-z]", self.text[self.at : self.at + 1]):
            self.at += 1
            return ord(self.text[self.at - 1]) % 32
        if not char:
            raise GrammarError("it ends in a backslash")
        if char.isdecimal() or char == "k":
            raise GrammarError("backreferences cannot be enforced")
        if char.isalpha() or char == "_":
            raise GrammarError(f"the escape '\\{char}' is not ECMAScript's, or cannot be enforced")
        return ord(char)

    def _whole(self, code: int) -> int:
        """Returns the code point of a pair of surrogates. Refuses a single surrogate."""
        if 0xD800 <= code < 0xDC00:
            low = _LOW.match(self.text, self.at)
            if low:
                self.at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low.group(1), 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise GrammarError(f"U+{code:X} is not a character")
        return code

    def _class(self) -> None:
        negated = self.text[self.at : self.at + 1] == "^"
        self.at += negated
        items: list[str] = []
        while True:
            if self.at >= len(self.text):
                raise GrammarError("it has a '[' without a ']'")
            if self.text[self.at] == "]":
                self.at += 1
                break
            items.append(self._class_item())
        if items:
            self.out.append(f"[[{'^' if negated else ''}{''.join(items)}]{_WRITABLE}]")
        elif negated:
            self.out.append(rf"[[\x00-\u{{10FFFF}}]{_WRITABLE}]")
        else:
            raise GrammarError("'[]' matches nothing")

    def _class_item(self) -> str:
        low = self._class_atom()
        # A dash at the end is a literal. Next to a set it would be ambiguous.
        if self.text[self.at : self.at + 1] != "-" or self.text[self.at + 1 : self.at + 2] == "]":
            return _member(low) if isinstance(low, int) else low
        self.at += 1
        if self.at >= len(self.text):
            raise GrammarError("it has a '[' without a ']'")
        high = self._class_atom()
        if isinstance(low, str) or isinstance(high, str):
            raise GrammarError("a range in a class needs characters on both sides of the '-'")
        if low > high:
            raise GrammarError("a range in a class is out of order")
        return f"{_member(low)}-{_member(high)}"

    def _class_atom(self) -> int | str:
        """Returns a code point, or a set in Rust's syntax."""
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ord(char)
        following = self.text[self.at : self.at + 1]
        if following == "b":
            self.at += 1
            return 8
        if following and (following.lower() in _CLASSES or _PROPERTY.match(self.text, self.at)):
            return self._escape()
        return self._code()


# -- formats -----------------------------------------------------------------------------------

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_YEAR_MONTH_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# A limit on a length needs a separate token mask at every position, for some 40,000 tokens. So only
# one limit of RFC 5321 is kept: the length of a mailbox's local part. Labels begin and end with
# letters or digits. In this form llguidance sees that any number of them may follow, and looks at a
# quarter of the tokens.
_DOMAIN = r"[A-Za-z0-9]+(?:(?:-+|\.)[A-Za-z0-9]+)*"
# "--" as third and fourth character is excluded, because it would have to be valid punycode (RFC
# 5890).
_HOST_LABEL = (
    "(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9])?"
    "|[A-Za-z0-9][A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])"
    "[A-Za-z0-9-]{0,58}[A-Za-z0-9])"
)
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# At most 64 characters. One count that includes dots costs a third of two simultaneous counts.
_LOCAL = rf"(?:{_ATOM}{{1,64}}|{_ATOM}(?:\.?{_ATOM}){{0,31}})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "(?:{})".format(
    "|".join(
        [f"(?:{_H}:){{7}}{_H}", "::"]
        # `before` groups, "::", `after` groups; at most seven of both.
        + [
            (f"{_H}(?::{_H}){{{before - 1}}}" if before else "")
            + "::"
            + (f"(?:{_H}:){{0,{6 - before}}}{_H}" if before < 7 else "")
            for before in range(7)
        ]
        + [f"{_H}(?::{_H}){{0,6}}::"]
    )
)
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_AUTHORITY = (
    r"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
    rf"(?:\[{_IPV6}\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}})*)(?::[0-9]*)?"
)
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
    rf"|{_PCHAR}+(?:/{_PCHAR}*)*)?(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)
_N = "[0-9]{1,5}"
_DURATION_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = (
    f"P(?:(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_DURATION_TIME})?"
    f"|{_DURATION_TIME}|{_N}W)"
)
_UUID = "[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{}[0-9A-Fa-f]{{3}}-{}[0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}"

_POINTER = r"(?:/(?:[^~/\x00-\x1F\x7F]|~[01])*)*"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = (
    r"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#\[\]-]|%[0-9A-Fa-f]{2}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
# Groups, ranges and lookaround are excluded, because they could be malformed.
_REGEX = (
    r"\^?(?:(?:[A-Za-z0-9 _/:;,@#%&=<>!'~-]|\.|\\[dDwWsS.^$*+?()\[\]{}|\\/-]"
    r"|\[\^?(?:[A-Za-z0-9_]|\\[dws])+\])[*+?]?)*\$?"
)

FORMATS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "date": ((_YEAR_MONTH_DAY,), None),
    "time": ((_CLOCK,), None),
    "date-time": ((f"{_YEAR_MONTH_DAY}[Tt]{_CLOCK}",), None),
    "duration": ((_DURATION,), None),
    **dict.fromkeys(
        ("email", "idn-email"),
        ((f"{_LOCAL}@{_DOMAIN}",), None),
    ),
    **dict.fromkeys(("hostname", "idn-hostname"), ((rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*",), 253)),
    "ipv4": ((_IPV4,), None),
    "ipv6": ((_IPV6,), None),
    "uri": ((_URI,), None),
    **dict.fromkeys(("iri", "uri-reference", "iri-reference", "url"), ((_URI,), None)),
    "uuid": ((_UUID.format("[0-9A-Fa-f]", "[0-9A-Fa-f]"),), None),
    **{f"uuid{n}": ((_UUID.format(n, "[89ABab]"),), None) for n in range(1, 9)},
    **dict.fromkeys(
        ("byte", "base64"),
        (
            (
                "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
            ),
            None,
        ),
    ),
    "base64url": (
        ("(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048])?",),
        None,
    ),
    "uri-template": ((_TEMPLATE,), None),
    "json-pointer": ((_POINTER,), None),
    "relative-json-pointer": ((f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",), None),
    "regex": ((_REGEX,), None),
}
"""For each format: regular expressions in Rust's syntax, all of which match the whole string, and
the greatest length. They describe a subset of the format: RFC 3339 without leap seconds, RFC 5321's
mailboxes without quoted local parts and address literals, URI references that are whole URIs,
regular expressions without groups, RFC 1123 without internationalized labels, RFC 4291 without
embedded IPv4."""

_LOOSER = {name: [rf"^(?:{_ATOM}+(?:\.{_ATOM}+)*@{_DOMAIN})$"] for name in ("email", "idn-email")}
"""Looser expressions for a format, for comparisons. They have no counts, which are slow to
compare."""

_IMPLIED = {
    # zod's
    "duration": frozenset(
        {
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
        }
    ),
}
"""Patterns that libraries write next to a format. Every string of the format matches them."""

HARMLESS_FORMATS = (
    "path", "file-path", "directory-path", "binary", "password", "textarea", "float", "double",
    "decimal",
)  # fmt: skip
"""Formats that only say how a value is displayed or stored. They add no rule."""
