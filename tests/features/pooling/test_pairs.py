"""Cut texts and pairs are those of the `tokenizers` library."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.text.pairs import cut_text, encode_pair, encode_texts
from quire.text.tokenizer import Tokenizer
from tests.features.pooling.encoders import WORDS, tokenizer_of


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_texts_and_pairs(side: str, tmp_path: Path) -> None:
    hub = tokenizer_of(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    draw = random.Random(1)
    for _ in range(200):
        most = draw.randint(3, 40)
        one, other = (" ".join(draw.choices(WORDS, k=draw.randint(0, 40))) for _ in range(2))
        hub.enable_truncation(most, strategy="longest_first", direction=side)
        wanted = hub.encode(one, other)
        ids, second = encode_pair(tokenizer, one, other, most=most, side=side)  # type: ignore[arg-type]
        assert ids.tolist() == wanted.ids
        assert second == wanted.type_ids.index(1)
        assert cut_text(tokenizer, one, most, side).tolist() == hub.encode(one).ids  # type: ignore[arg-type]


def test_the_configuration_names_the_side(tmp_path: Path) -> None:
    tokenizer_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "left"}')
    tokenizer = Tokenizer.from_path(tmp_path)
    whole = tokenizer.encode("the old fox sleeps").tolist()
    assert cut_text(tokenizer, "the old fox sleeps", 4).tolist() == [whole[0], *whole[-3:]]
    with pytest.raises(RequestError, match="special tokens"):
        cut_text(tokenizer, "fox", 1)


def test_many_texts(tmp_path: Path) -> None:
    tokenizer_of(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    first, ids, last = encode_texts(tokenizer, ["the fox", [2, 9, 3], "a king"])
    assert first.tolist() == tokenizer.encode("the fox").tolist()
    assert ids == [2, 9, 3]
    assert last.tolist() == tokenizer.encode("a king").tolist()
