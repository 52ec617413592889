"""Grammars of texts inside JSON strings.

A grammar describes a text. A model that writes the text inside a JSON string escapes quotes, line
breaks and backslashes. `json_lark` returns the grammar of the escaped texts: it keeps the rules and
rewrites their strings and regular expressions character by character.

llguidance's lexer looks one byte ahead and never goes back. An escape has two bytes, so a lexeme
such as `/.*/` could not end before the escape of a line feed. A repeated class therefore becomes an
expression over lexemes that no escape can extend: runs of plain characters, and single escapes.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from quire.errors import GrammarError

_ESCAPES = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
"""Maps characters that JSON escapes to the character after the backslash."""
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes as \\uXXXX, which the grammars of JSON do not allow."""
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_LETTERS = re.compile(r"\\p(?:[LNM]|\{[LNM][a-z]?\})")
"""Classes of letters, digits and marks: no character of them is escaped."""
_HEX = re.compile(
    r"x(?:([0-9a-fA-F]{2})|\{([0-9a-fA-F]{1,6})\})|u(?:([0-9a-fA-F]{4})|\{([0-9a-fA-F]{1,6})\})"
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_FLAGS = re.compile(r"\?(?:P?<\w+>|([a-z]*)(?:-([a-z]*))?(:|\)))")
_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)|(?P<range>"(?:\\.|[^"\\\n])*"\s*\.\.\s*"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)"""
    r"""|(?P<import>%import[^\n]*)|(?P<ignore>%ignore\b[^\n]*)"""
    r"""|(?P<refused>%\w+|~(?!\s*[0-9])|<[^>\s]+>|@\w+)"""
    r"""|(?P<terminal>^[ \t]*_*[A-Z][A-Z0-9_]*(?=[ \t]*:))|(?P<rule>^[ \t]*[?!]*_*[a-z]\w*)"""
    r"""|(?P<name>(?<![A-Za-z0-9_])_*[A-Z][A-Z0-9_]*)""",
    re.MULTILINE,
)
_IMPORT = re.compile(
    r"%import\s+common(?:\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?|\s*\((?P<names>[\w\s,]+)\))\s*"
)
_COMMON = {
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
}
"""Terminals of Lark's module `common` whose texts JSON escapes."""


def json_lark(grammar: str) -> str:
    """Returns the Lark grammar of the texts of `grammar` as they are inside a JSON string.

    Raises:
        GrammarError: the grammar has a construct that cannot be rewritten.
    """
    return _Rewriter(grammar).run()


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of characters.

    Attributes:
        plain: expression for its characters that JSON does not escape.
        escapes: expressions for the escapes of its other characters.
    """

    plain: str
    escapes: tuple[str, ...]

    def __str__(self) -> str:
        return f"(?:{'|'.join((self.plain, *self.escapes))})"


_Parts = list["str | _Class"]


class _Rewriter:
    """Rewrites one grammar.

    A terminal that is one repeated class becomes a rule, unless another terminal uses it.
    """

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._tokens = list(_TOKEN.finditer(grammar))
        self._in_rule = False
        self._classes: dict[str, _Parts] = {}
        self._used: set[str] = set()
        self._find_classes()

    def run(self) -> str:
        out, at = [], 0
        for token in self._tokens:
            out += [self._grammar[at : token.start()], self._rewrite(token)]
            at = token.end()
        return "".join([*out, self._grammar[at:]])

    def _find_classes(self) -> None:
        """Finds the terminals that are a repeated class, and those that terminals use."""
        in_terminal = False
        for place, token in enumerate(self._tokens):
            match token.lastgroup:
                case "terminal":
                    in_terminal = True
                    body = self._only_regex(place)
                    if body is not None:
                        self._add_class(token.group().strip(), _regex_parts(body))
                case "name" if in_terminal:
                    self._used.add(token.group())
                case "import":
                    for name, common in _imports(token.group()):
                        if common in _COMMON:
                            self._add_class(name, _Escaper(_COMMON[common]).parts())
                    in_terminal = False
                case "rule" | "ignore":
                    in_terminal = False

    def _only_regex(self, place: int) -> str | None:
        """Returns a terminal's regular expression if the terminal is nothing else.

        Args:
            place: index of the token with the terminal's name.
        """
        name, *following = self._tokens[place : place + 2]
        definition = self._grammar[name.end() :].partition(":")[2].lstrip()
        body = following[0].group() if following else ""
        rest = definition.removeprefix(body).lstrip(" \t")
        is_regex = bool(following) and following[0].lastgroup == "regex"
        is_whole = rest[:1] in ("", "\n") and rest.lstrip()[:1] != "|"
        return body if is_regex and definition.startswith(body) and is_whole else None

    def _add_class(self, name: str, parts: _Parts) -> None:
        if _repeated_class(parts) is not None:
            self._classes[name] = parts

    def _rule_name(self, name: str) -> str:
        """Returns the name of a terminal, or of the rule that it becomes."""
        return f"class_{name.lower()}" if self._is_rule(name) else name

    def _is_rule(self, name: str) -> bool:
        return name in self._classes and name not in self._used

    def _rewrite(self, token: re.Match[str]) -> str:
        text = token.group()
        match token.lastgroup:
            case "string":
                return _string(text)
            case "range":
                low, high = (_decoded(end.strip()) for end in re.split(r'(?<=")\s*\.\.', text))
                return _lexeme(_Escaper(f"[{_member(low)}-{_member(high)}]").parts())
            case "regex":
                return _expression(_regex_parts(text), in_rule=self._in_rule)
            case "import":
                return "\n".join(self._import(*names) for names in _imports(text))
            case "ignore":
                return self._ignore(text.removeprefix("%ignore").strip())
            case "terminal":
                self._in_rule = self._is_rule(text.strip())
                return self._rule_name(text.strip())
            case "rule":
                self._in_rule = True
            case "name":
                return self._rule_name(text)
            case "refused":
                raise GrammarError(
                    f"{text[:40]!r} is not available in the grammar of a custom tool, because "
                    "this model writes the tool's input inside JSON."
                )
        return text

    def _import(self, name: str, common: str) -> str:
        if common not in _COMMON:
            return f"%import common.{common} -> {name}"
        parts = _Escaper(_COMMON[common]).parts()
        return f"{self._rule_name(name)}: {_expression(parts, in_rule=self._is_rule(name))}"

    def _ignore(self, what: str) -> str:
        """Rewrites what `%ignore` ignores: a terminal, a string or a regular expression."""
        parts = _regex_parts(what) if what.startswith("/") else self._classes.get(what)
        if parts is None:
            return f"%ignore {_string(what) if what.startswith(chr(34)) else what}"
        found = _repeated_class(parts)
        if found is None:
            return f"%ignore {_lexeme(parts)}"
        return "\n".join(f"%ignore /{part}/" for part in (f"{found[0].plain}+", *found[0].escapes))


def _imports(text: str) -> list[tuple[str, str]]:
    """Returns the names that `%import` introduces, each with its name in `common`."""
    found = _IMPORT.fullmatch(text)
    if found is None:
        raise GrammarError(f"{text[:60]!r} is not available; '%import common.NAME' is.")
    if found["names"] is not None:
        return [(name.strip(), name.strip()) for name in found["names"].split(",")]
    return [(found["alias"] or found["name"], found["name"])]


def _string(text: str) -> str:
    if text.endswith("i"):
        return f"/(?i:{''.join(map(_character, _decoded(text[:-1])))})/"
    value = _decoded(text)
    _check_writable(value)
    return json.dumps(json.dumps(value, ensure_ascii=False)[1:-1], ensure_ascii=False)


def _decoded(quoted: str) -> str:
    try:
        value: str = ast.literal_eval(quoted)
    except (SyntaxError, ValueError):
        raise GrammarError(f"The string {quoted[:40]} has an unknown escape.") from None
    return value


def _member(char: str) -> str:
    if len(char) != 1:
        raise GrammarError("The ends of a range must be single characters.")
    return _code(char)


def _regex_parts(text: str) -> _Parts:
    """Returns the parts of a regular expression between slashes."""
    body, _, flags = text[1:].rpartition("/")
    if not set(flags) <= set("ims"):
        raise GrammarError(f"The flags {flags!r} of a regular expression are not available.")
    parts = _Escaper(body.replace("\\/", "/"), dot_all="s" in flags).parts()
    return ["(?i:", *parts, ")"] if "i" in flags else parts


def _expression(parts: _Parts, *, in_rule: bool) -> str:
    """Returns the Lark expression of a regular expression's parts.

    Args:
        in_rule: the expression is in a rule. A terminal can only have lexemes.
    """
    found = _repeated_class(parts) if in_rule else None
    if found is None:
        return _lexeme(parts)
    characters, quantifier = found
    run = f"/{characters.plain}{'+' if quantifier in ('*', '+') else ''}/"
    return f"({' | '.join((run, *(f'/{escape}/' for escape in characters.escapes)))}){quantifier}"


def _repeated_class(parts: _Parts) -> tuple[_Class, str] | None:
    """Returns a class and its quantifier if the parts are nothing else, and the class has
    escapes."""
    while len(parts) > 2 and parts[0] in ("(", "(?:", "(?s:") and parts[-1] == ")":
        parts = parts[1:-1]
    quantifier = parts[1] if len(parts) == 2 else ""
    characters = parts[0] if len(parts) in (1, 2) else None
    if not isinstance(characters, _Class) or quantifier not in ("", "*", "+", "?"):
        return None
    return (characters, str(quantifier)) if characters.escapes else None


def _lexeme(parts: _Parts) -> str:
    return f"/{''.join(map(str, parts))}/"


def _check_writable(text: str) -> None:
    if found := _UNWRITABLE.search(text):
        raise GrammarError(f"The control character U+{ord(found.group()):04X} cannot be enforced.")


def _code(char: str) -> str:
    return f"\\u{{{ord(char):X}}}"


def _character(char: str) -> str:
    """Returns an expression for one character as JSON writes it."""
    _check_writable(char)
    if char in _ESCAPES:
        return _escape(char)
    return char if char.isascii() and char.isalnum() else _code(char)


def _escape(char: str) -> str:
    # Letters of escapes have one case, even where the expression ignores the case.
    after = _ESCAPES[char]
    return f"(?-i:\\u{{5C}}{after if after.isalpha() else _code(after)})"


class _Escaper:
    """Rewrites one regular expression.

    A character becomes its escape; a class becomes its plain characters or the escapes of the
    others; all else stays.

    Args:
        text: in Rust's syntax.
        dot_all: `.` matches line feeds.
    """

    def __init__(self, text: str, dot_all: bool = False) -> None:
        self._text = text
        self._at = 0
        self._dot_all = [dot_all]

    def parts(self) -> _Parts:
        out = []
        while self._at < len(self._text):
            out.append(self._next())
        return [part for part in out if part]

    def _take(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return char

    def _next(self) -> str | _Class:
        match char := self._take():
            case "(":
                return self._group()
            case ")":
                if len(self._dot_all) > 1:
                    self._dot_all.pop()
                return char
            case "{":
                end = self._text.find("}", self._at) + 1
                quantifier, self._at = self._text[self._at - 1 : end], max(end, self._at)
                return quantifier
            case "*" | "+" | "?" | "|" | "^" | "$":
                return char
            case ".":
                return _class(r"[\x00-\u{10FFFF}]", "") if self._dot_all[-1] else _NOT_LINE_FEED
            case "[":
                return self._class()
            case "\\":
                return self._escaped()
        return _character(char)

    def _group(self) -> str:
        found = _FLAGS.match(self._text, self._at)
        dot_all = self._dot_all[-1]
        if found is None:
            if self._text.startswith("?", self._at):
                raise GrammarError("Lookahead and lookbehind cannot be enforced.")
            self._dot_all.append(dot_all)
            return "("
        self._at = found.end()
        on, off, end = found.groups(default="")
        if "x" in on:
            raise GrammarError("The flag 'x' of a regular expression is not available.")
        dot_all = ("s" in on or dot_all) and "s" not in off
        if end == ")":
            self._dot_all[-1] = dot_all
            kept = on.replace("s", "")
            return f"(?{kept})" if kept else ""
        self._dot_all.append(dot_all)
        return f"({found.group()}"

    def _escaped(self) -> str | _Class:
        """Reads an escape after its backslash, outside of a class."""
        char = self._text[self._at : self._at + 1]
        if char in ("d", "w"):
            return f"\\{self._take()}"
        if char and char in "sDWS":
            self._at += 1
            return _class(f"[\\{char}]", f"[\\{char}]")
        if found := _LETTERS.match(self._text, self._at - 1):
            self._at = found.end()
            return found.group()
        return _character(self._escaped_character())

    def _escaped_character(self) -> str:
        if found := _HEX.match(self._text, self._at):
            self._at = found.end()
            code = int(next(group for group in found.groups() if group is not None), 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise GrammarError(f"U+{code:X} is not a character.")
            return chr(code)
        char = self._take()
        if char in _CONTROLS:
            return _CONTROLS[char]
        if not char or char.isalnum():
            raise GrammarError(f"The escape '\\{char}' of a regular expression is not available.")
        return char

    def _class(self) -> _Class:
        """Reads a class after its bracket, in Rust's and in Python's syntax."""
        begin = "[^" if self._text.startswith("^", self._at) else "["
        self._at += len(begin) - 1
        rust, python, first = [begin], [begin], self._at
        while (char := self._take()) != "]" or self._at - 1 == first:
            if not char:
                raise GrammarError("A regular expression has a '[' without a ']'.")
            if char == "[" or self._text.startswith(("&&", "--", "~~"), self._at - 1):
                raise GrammarError("Classes inside classes are not available.")
            after = self._text[self._at : self._at + 1]
            if char == "-":
                rust.append("-")
                python.append("-")
            elif char == "\\" and (found := _LETTERS.match(self._text, self._at - 1)):
                self._at = found.end()
                rust.append(found.group())
            elif char == "\\" and after and after in "dwsDWS":
                self._at += 1
                rust.append(f"\\{after}")
                python.append(f"\\{after}")
            else:
                char = self._escaped_character() if char == "\\" else char
                rust.append(_code(char))
                python.append(f"\\U{ord(char):08X}")
        return _class("".join([*rust, "]"]), "".join([*python, "]"]))


def _class(rust: str, python: str) -> _Class:
    """Returns a class.

    Args:
        rust: the class in Rust's syntax.
        python: a class in Python's syntax with the same escaped characters; "" has all of them.
    """
    try:
        members = python not in ("[]", "") and re.compile(python)
    except re.error as error:
        raise GrammarError(f"A class of a regular expression is invalid: {error}.") from None
    everything = python in ("", "[^]")
    escaped = [c for c in _ESCAPES if everything or (members and members.fullmatch(c))]
    return _Class(f"[{rust}&&{_PLAIN}]", tuple(map(_escape, escaped)))


_NOT_LINE_FEED = _class(r"[^\n]", r"[^\n]")
