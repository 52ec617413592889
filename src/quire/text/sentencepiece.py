"""Reads SentencePiece models (Kudo & Richardson 2018) of the kind BPE, which merge pairs by
score."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from quire.errors import ModelError
from quire.system import MOST_TABLE, read_bounded

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
"""Types of pieces: ordinary text, the piece for unknown text, control pieces, which no text is
encoded to, and user-defined pieces, which are never split."""
_BPE = 2


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a SentencePiece model.

    Attributes:
        texts: the text of each piece.
        scores: the score of each piece.
        types: the type of each piece.
        special: ids of "bos", "eos", "unk" and "pad", if the model has them.
        prefix: whether a space is added before each text.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    special: dict[str, int]
    prefix: bool


def read_pieces(file: Path) -> Pieces:
    """Reads a `tokenizer.model`.

    Raises:
        ModelError: the file is not a SentencePiece model of the kind BPE, or it normalizes text.
    """
    data = read_bounded(file, MOST_TABLE)
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                texts.append(piece.get(1, b"").decode("utf-8"))
                scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
                types.append(piece.get(3, NORMAL))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                rules = dict(_fields(value))
    except (AttributeError, IndexError, TypeError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is not a SentencePiece model") from error
    if not texts:
        raise ModelError(f"{file} is not a SentencePiece model")
    if trainer.get(3, 1) != _BPE:
        raise _refused(file, "a model that is not of the kind BPE")
    if rules.get(2) or rules.get(4, 1):
        raise _refused(file, "a model that normalizes text")
    fields = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
    ids = {name: trainer.get(field, default) for name, (field, default) in fields.items()}
    special = {name: id for name, id in ids.items() if 0 <= id < len(texts)}
    return Pieces(texts, scores, types, special, bool(rules.get(3, 1)))


def _refused(file: Path, what: str) -> ModelError:
    return ModelError(
        f"{file}: {what} is not supported; make a tokenizer.json of it with transformers "
        "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field numbers and values, integers or bytes, of a Protocol Buffers message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            # Negative integers are encoded as 64 bits.
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("not a message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the integer at an offset, and the offset after it."""
    value = shift = 0
    while data[at] & 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def pair_tokenizer(
    texts: Sequence[str], scores: Sequence[float], unknown: int | None, *, prefix: bool
) -> Tokenizer:
    """Returns a BPE tokenizer with byte fallback. Like SentencePiece, it merges pieces in the order
    of their scores."""
    vocabulary = {text: place for place, text in enumerate(texts)}
    found = []
    for piece, score in zip(texts, scores, strict=True):
        own = [
            (vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
            for at in range(1, len(piece))
            if piece[:at] in vocabulary and piece[at:] in vocabulary
        ]
        found += [(-score, *pair) for pair in sorted(own)]
    found.sort(key=lambda entry: entry[0])
    merges = [(entry[3], entry[4]) for entry in found]
    bpe = models.BPE(
        vocabulary, merges, unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(bpe)
    space: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if prefix:
        space.insert(0, normalizers.Prepend("▁"))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(space)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
