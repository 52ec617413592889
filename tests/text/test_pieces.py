"""Long texts that are tokenized in pieces have the tokens of the whole text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer

from quire.text import pieces
from quire.text.gguf_splitting import SPLITTINGS
from quire.text.pieces import cut_at_gaps, separates_words
from quire.text.tokenizer import Tokenizer

PARTS = [
    "a",
    "Bc",
    " ",
    "  ",
    "\n",
    "\u0301",
    "é",
    "don't",
    "'re",
    "42",
    "1234",
    "中文",
    "...",
    "/",
    "_",
]
KNOWN = ("llama3", "qwen2", "qwen35", "gpt-4o", "deepseek-v3", "smollm", "tekken")
texts = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def tokenizer(*steps: pre_tokenizers.PreTokenizer) -> HubTokenizer:
    """Returns a tokenizer of bytes, and of some pairs."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "a"), ("a", "B"), ("B", "c"), ("a", "a"), ("a", "Ġ"), ("c", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    hub = HubTokenizer(models.BPE(vocab, merges))
    hub.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return hub


def split_by(*patterns: str) -> HubTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return tokenizer(*splits, pre_tokenizers.ByteLevel(False, use_regex=False))


TOKENIZERS = {
    **{name: split_by(*SPLITTINGS[name].patterns) for name in KNOWN},
    "gpt-2": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "digits": tokenizer(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
@settings(max_examples=60)
def test_pieces_have_the_tokens_of_the_text(name: str, text: str) -> None:
    hub = TOKENIZERS[name]
    assert separates_words(hub)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE", 1)
        parts = cut_at_gaps(text)
    assert "".join(parts) == text
    found = [id for part in parts for id in hub.encode(part).ids]
    assert found == hub.encode(text).ids


def test_tokenizers_that_may_join_words() -> None:
    byte_level = pre_tokenizers.ByteLevel(False, use_regex=False)
    assert not separates_words(split_by(*SPLITTINGS["exaone-moe"].patterns))
    assert not separates_words(split_by(r"\p{N}"))
    assert not separates_words(tokenizer(byte_level))
    assert not separates_words(tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)))
    # Behind the step of bytes, a space is Ġ, which is a letter.
    words = pre_tokenizers.Split(Regex(SPLITTINGS["qwen2"].patterns[0]), "isolated")
    assert not separates_words(tokenizer(byte_level, words))
    assert not separates_words(tokenizer(pre_tokenizers.Metaspace()))
    assert not separates_words(HubTokenizer(models.BPE()))
    for token in (AddedToken("two words"), AddedToken("<mask>", rstrip=True)):
        hub = split_by(*SPLITTINGS["qwen2"].patterns)
        hub.add_tokens([token])
        assert not separates_words(hub)


@pytest.mark.parametrize("ends", [False, True])
def test_a_long_text_gets_its_special_tokens_once(ends: bool) -> None:
    hub = split_by(*SPLITTINGS["llama3"].patterns)
    hub.add_special_tokens(["<s>", "</s>"])
    if ends:
        special = [(token, hub.token_to_id(token)) for token in ("<s>", "</s>")]
        hub.post_processor = processors.TemplateProcessing("<s> $A </s>", None, special)
    draw = random.Random(0)
    text = " ".join("".join(draw.choices("aBc1é", k=draw.randrange(1, 9))) for _ in range(1500))
    assert len(cut_at_gaps(text)) > 5
    own = Tokenizer(hub, {})
    for add in (False, True):
        assert own.encode(text, add).tolist() == hub.encode(text, add_special_tokens=add).ids
