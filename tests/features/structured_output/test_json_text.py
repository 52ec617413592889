"""Grammars of texts inside JSON strings accept the escapes of the texts, and nothing else."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.errors import GrammarError
from quire.grammar.json_text import json_lark

REGEXES = [
    r"a.b", r"(?s:a.b)", r"[^\"]+", r"\s+x", r"\S+", r"[\]\-a]+", r"[a-c\"\\]{2,3}", r"(?i:ab\n)",
    r"\d+\.\d+", r"x\x22y", r"[^\n]*\n", r"\p{L}+", r"[\p{L} \t]+", r"a|\"b\"", r"(?P<n>q\\)+",
    r"[]a]+", r"\W", r"\/x\/", r"(?s:.*)", r"[\"\n]+", r".*", r"(.+)", r"\u{22}\u0041?",
]  # fmt: skip
TEXTS = [
    'a"b', "a\nb", "axb", "a\\b", "ab\n", "AB\n", '"', "\\", "\n\tx", " x", "-]", "a]", 'ab"',
    "1.5", 'x"y', "foo\n", "é", "é\t", "q\\", "q\\q\\", '"b"', "", "]a", "/x/", "foo bar", "\\n",
]  # fmt: skip


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("form", ["start: /%s/", "start: T\nT: /%s/\n"])
def test_expressions(form: str, regex: str) -> None:
    lark = form.replace("%s", regex)
    inside = json_lark(lark)
    for text in TEXTS:
        assert accepts(inside, escaped(text)) == accepts(lark, text), text


GRAMMARS = {
    "start: (NAME LF)+\nNAME: /.+/\n%import common.LF": ["a\nb\n", 'a"\\\n', "a", "\n"],
    'start: name "=" ESCAPED_STRING\nname: /[a-z]+/\n'
    "%import common (WS, ESCAPED_STRING)\n%ignore WS": ['a="b"', ' a =\n "b\\" c"', 'a="', "a=b"],
    'start: A+\nA: B | "x"\nB: /["a]+/': ['"a"x', "x", "y"],
    'start: "a".."c" "\\"".."$" /x/i "é\\n"i': ['a"xé\n', "b#XÉ\n", "d#xé\n"],
    "start: WS_INLINE INT NEWLINE // a comment\n%import common.WS_INLINE\n%import common.INT\n"
    "%import common.NEWLINE": ["\t 12\r\n\n", "\t 12", "12\n"],
    'start: LINE~2\nLINE: /[^\\n]*/ "\\n"\n': ["a\n\\b\n", "a\n", "a\nb\nc\n"],
    "start: C\n%import common.C_COMMENT -> C": ['/* a\n*" */', "/* a", "/**/"],
}


@pytest.mark.parametrize("lark", GRAMMARS)
def test_grammars(lark: str) -> None:
    inside = json_lark(lark)
    results = [accepts(lark, text) for text in GRAMMARS[lark]]
    assert [accepts(inside, escaped(text)) for text in GRAMMARS[lark]] == results
    assert len(set(results)) == 2


@pytest.mark.parametrize(
    "lark",
    [
        'start: %json {"type": "object"}', "start: <|im_end|>", "start: @other",
        "start: A\nA: ~/a/",
        "start: /a(?=b)/", "start: /[[a]b]/", "start: /[a&&b]/", r"start: /\bx/", "start: /a/x",
        "start: /(?x: a)/", "start: /[a/", r'start: "\x01"', r"start: /\x01/", r'start: "\q\x"',
        "%import mine.X\nstart: X", "start: /\\u{110000}/", r"start: /[z-a]/",
        'start: "ab".."c"',
    ],
)  # fmt: skip
def test_what_cannot_be_rewritten(lark: str) -> None:
    with pytest.raises(GrammarError):
        json_lark(lark)
