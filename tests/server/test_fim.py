"""Prompts with a prefix and a suffix, filled in the middle."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from quire.errors import RequestError
from quire.server.apis.openai.fim import infill
from quire.text.tokenizer import Tokenizer

WORDS = {"<unk>": 0, "def": 1, "return": 2, "x": 3}


def tokenizer(*special: str, bos: bool = False) -> Tokenizer:
    hub = HubTokenizer(WordLevel(dict(WORDS), unk_token="<unk>"))
    hub.pre_tokenizer = Whitespace()
    hub.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", *special)])
    if bos:
        hub.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    return Tokenizer(hub, {"bos_token": "<s>"}, None)


def test_prefix_suffix_middle() -> None:
    qwen = tokenizer("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    assert infill(qwen, "def x", "return x") == [5, 1, 3, 7, 2, 3, 6]
    assert infill(qwen, [1, 1], "x") == [5, 1, 1, 7, 3, 6]


def test_the_text_begins_as_always() -> None:
    llama = tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", bos=True)
    assert infill(llama, "def", "x") == [4, 5, 1, 6, 3, 7]


def test_suffix_first() -> None:
    codestral = tokenizer("[PREFIX]", "[SUFFIX]", bos=True)
    assert infill(codestral, "def", "return x") == [4, 6, 2, 3, 5, 1]


@pytest.mark.parametrize("special", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("<fim_middle>",)])
def test_vocabularies_without_it(special: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="suffix") as error:
        infill(tokenizer(*special), "def", "x")
    assert error.value.param == "suffix"
