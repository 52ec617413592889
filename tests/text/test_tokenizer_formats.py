"""Tokenizers without a tokenizer.json, compared with their original algorithms."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models, processors

from quire.errors import ModelError
from quire.text.tokenizer import Tokenizer

WORDS = ["a", "ab", "banana", "ünï", "中文", " ", "\n", "  ", "12345", "don't", "DON'T", "...", "b"]


def texts(count: int = 80) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(WORDS, k=draw.randrange(9))) for _ in range(count)]


def random_ranks(count: int) -> list[bytes]:
    """Returns a vocabulary of bytes and merged pairs of earlier tokens, as from training."""
    draw = random.Random(1)
    ranks = [bytes([byte]) for byte in range(256)]
    source = "".join(texts()).encode()
    while len(ranks) < count:
        start = draw.randrange(len(source) - 8)
        first = [token for token in ranks if source[start:].startswith(token)]
        one = draw.choice(first)
        second = [token for token in ranks if source[start + len(one) :].startswith(token)]
        token = one + draw.choice(second)
        if token not in ranks:
            ranks.append(token)
    return ranks


def merged(parts: list[Any], order: dict[Any, float]) -> list[Any]:
    """Merges neighbours in the order of `order`, until none can be merged."""
    while True:
        pairs = [(order.get(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [(rank, at) for rank, at in pairs if rank is not None]
        if not known:
            return parts
        _, at = min(known)
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


def tekken(folder: Path, **more: Any) -> list[bytes]:
    ranks = random_ranks(320)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(ranks)
    ]
    settings = {
        "pattern": r"\p{L}+|\s+|[^\s\p{L}]+", "num_vocab_tokens": 320, "default_vocab_size": 330,
        "default_num_special_tokens": 25, "version": "v3",
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": settings, "vocab": vocab, **more}))
    return ranks[:305]


def test_tekken(tmp_path: Path) -> None:
    ranks = tekken(tmp_path)
    order = {token: rank for rank, token in enumerate(ranks)}
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.vocab_size == 330
    assert tokenizer.eos_token_ids == (2,)
    for text in texts():
        words = re.findall(r"[^\W\d_]+|\s+|[^\sa-zA-Zünï中文]+", text)
        assert "".join(words) == text
        parts = [part for word in words for part in _whole_or_merged(word.encode(), order)]
        found = tokenizer.encode(text).tolist()
        assert found == [1, *(25 + order[part] for part in parts)]
        assert tokenizer.decode(found) == text
    assert tokenizer.encode("[INST]", add_special_tokens=False).tolist() == [3]
    assert tokenizer.token_bytes(25 + 255) == b"\xff"


def _whole_or_merged(word: bytes, order: dict[bytes, int]) -> list[bytes]:
    return [word] if word in order else merged([bytes([b]) for b in word], dict(order))


def test_tekken_that_names_its_special_tokens(tmp_path: Path) -> None:
    tekken(tmp_path, special_tokens=[{"rank": 7, "token_str": "[THINK]", "is_control": True}])
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.encode("[THINK]<SPECIAL_24>").tolist() == [7, 24]
    assert tokenizer.special_tokens == {}


def tiktoken(folder: Path, module: str = "tokenization_kimi") -> list[bytes]:
    ranks = random_ranks(300)
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_text("\n".join(lines))
    config = {
        "auto_map": {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(300 + place): {"content": text, "special": True}
            for place, text in enumerate(("[BOS]", "[EOS]", "<|im_end|>"))
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ranks


def test_kimi(tmp_path: Path) -> None:
    ranks = tiktoken(tmp_path)
    order = {token: rank for rank, token in enumerate(ranks)}
    tokenizer = Tokenizer.from_path(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (556, (301,))
    words = ["Hello", "中文", " it's", " ", "123", "4", "  ", " DON'T", "...\n", "aBC", "Def"]
    text = "".join(words)
    parts = [part for word in words for part in _whole_or_merged(word.encode(), order)]
    # In one pattern, "aBC" ends before a capital that is followed by small letters.
    assert tokenizer.encode(text).tolist() == [order[part] for part in parts]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|><|reserved_token_303|>").tolist() == [302, 303]


def test_ranks_of_other_models_are_refused(tmp_path: Path) -> None:
    tiktoken(tmp_path, "tokenization_other")
    with pytest.raises(ModelError, match=r"names no module that is known \(tokenization_kimi"):
        Tokenizer.from_path(tmp_path)
    tiktoken(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 1\n")
    with pytest.raises(ModelError, match="ranks must be 0, 1, 2"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYQ== 1\n")
    with pytest.raises(ModelError, match="contains a token twice"):
        Tokenizer.from_path(tmp_path)


def _message(*fields: tuple[int, Any]) -> bytes:
    """Returns fields as Protocol Buffers: integers, floats and bytes."""

    def varint(value: int) -> bytes:
        value &= (1 << 64) - 1
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


PIECES = ["a", "b", "n", "▁", "na", "▁b", "ana", "▁ba", "an", "nana", "▁bana", "▁a", "ab", "▁▁"]


def sentencepiece(folder: Path, kind: int = 2, rules: bytes | None = None) -> dict[str, int]:
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<|x|>", 4)]
    pieces += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    pieces += [(piece, 1) for piece in PIECES]
    parts = [
        (1, _message((1, text.encode()), (2, -float(place)), (3, type)))
        for place, (text, type) in enumerate(pieces)
    ]
    rules = _message((3, 1), (4, 0)) if rules is None else rules
    trainer = _message((3, kind), (35, 1), (43, -1))
    (folder / "tokenizer.model").write_bytes(_message(*parts, (2, trainer), (3, rules)))
    return {text: id for id, (text, _) in enumerate(pieces)}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    vocabulary = sentencepiece(tmp_path, rules=_message((3, int(prefix)), (4, 0)))
    added = {str(len(vocabulary)): {"content": "<|im_start|>", "special": True}}
    config = {"added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip
    order = {text: float(vocabulary[text]) for text in PIECES}
    for text in texts():
        marked = f"{'▁' if prefix and text else ''}{text.replace(' ', '▁')}"
        want = [1]
        for part in merged(list(marked), order):
            known = [vocabulary[part]] if part in vocabulary else []
            want += known or [vocabulary[f"<0x{byte:02X}>"] for byte in part.encode()]
        assert tokenizer.encode(text).tolist() == want
        assert tokenizer.decode(want) == text
    ids = tokenizer.encode("<|im_start|><|x|>", add_special_tokens=False).tolist()
    assert ids == [len(vocabulary), 3]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kind": 1}, "not of the kind BPE is not supported; make a tokenizer.json"),
        ({"rules": _message((2, b"map"), (4, 0))}, "normalizes text is not supported"),
        ({"rules": _message((3, 1))}, "normalizes text is not supported"),
    ],
)
def test_sentencepiece_of_other_kinds_is_refused(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    sentencepiece(tmp_path, **more)
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_path(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    vocabulary = sentencepiece(tmp_path)
    config = {"added_tokens_decoder": {str(len(vocabulary) + 1): {"content": "<|y|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"the token '<\|y\|>' has the id"):
        Tokenizer.from_path(tmp_path)
    for content in (b"", b"\x0a\xff", b"nothing of this kind", b"\x0a\x02\x0a\x05"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match="is not a SentencePiece model"):
            Tokenizer.from_path(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tekken.json cannot be read: KeyError"):
        Tokenizer.from_path(tmp_path)
    tekken(tmp_path)
    content = json.loads((tmp_path / "tekken.json").read_text())
    content["config"]["default_num_special_tokens"] = 2**40
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="default_num_special_tokens 1099511627776"):
        Tokenizer.from_path(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.json, nor tekken.json, tiktoken.model"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("begins", [True, False, None])
@pytest.mark.parametrize("ends", [True, False, None])
def test_ends_of_texts_by_tokenizer_config(
    begins: bool | None, ends: bool | None, tmp_path: Path
) -> None:
    """Adds the same BOS as transformers to DeepSeek's tokenizers, whose tokenizer.json has none."""
    transformers = pytest.importorskip("transformers")
    hub = HubTokenizer(models.BPE({char: place for place, char in enumerate("abcdef")}, []))
    hub.add_special_tokens(["<s>", "</s>"])
    hub.post_processor = processors.ByteLevel(trim_offsets=False)
    hub.save(str(tmp_path / "tokenizer.json"))
    asked = {
        name: value
        for name, value in (("add_bos_token", begins), ("add_eos_token", ends))
        if value is not None
    }
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **asked}
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=HubTokenizer.from_str(hub.to_str()), bos_token="<s>", eos_token="</s>",
        add_bos_token=begins is True or (begins is None and ends is True), add_eos_token=ends,
    )  # fmt: skip
    for name, expected in (
        ("LlamaTokenizerFast", oracle("abc")["input_ids"]),
        ("PreTrainedTokenizerFast", hub.encode("abc").ids),
    ):
        told = json.dumps({"tokenizer_class": name, **config})
        (tmp_path / "tokenizer_config.json").write_text(told)
        own = Tokenizer.from_path(tmp_path)
        assert own.encode("abc").tolist() == expected
        assert own.encode("abc", add_special_tokens=False).tolist() == hub.encode("abc").ids
