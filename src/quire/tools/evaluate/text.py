"""Reads texts, and divides them into the windows that a model reads."""

from __future__ import annotations

import gzip
import lzma
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.system import MOST_DATA, open_regular

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def read_text(file: Path) -> str:
    """Returns the text of a UTF-8 file, which may be compressed (.gz, .xz).

    Raises:
        ConfigError: the file cannot be read, is empty, or is too large.
    """
    try:
        with open_regular(file) as stored, _OPENERS.get(file.suffix, nullcontext)(stored) as opened:
            data = opened.read(MOST_DATA + 1)
        if len(data) > MOST_DATA:
            raise ConfigError(f"{file} holds more than {MOST_DATA} bytes of text", "data")
        text: str = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"cannot read {file}: {error}", "data") from error
    if not text.strip():
        raise ConfigError(f"{file} is empty", "data")
    return text


def check_vocabulary(tokens: Int32, vocab_size: int) -> None:
    """Raises ConfigError for token ids beyond the model's vocabulary, which some tokenizers
    have."""
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise ConfigError(
            f"the text has token id {largest}, but the model's vocabulary ends at {vocab_size - 1}",
            "data",
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a text that the model reads at once, without the text before it.

    Attributes:
        tokens: int32 [n].
        first: index of the first scored token. The tokens before it are context.
        place: index of that token among all scored tokens of the text.
    """

    tokens: Int32
    first: int
    place: int

    @property
    def counted(self) -> int:
        return len(self.tokens) - self.first


def windows_of(tokens: Int32, size: int, stride: int) -> list[Window]:
    """Returns windows of `size` tokens, one every `stride` tokens.

    Each token is scored once: in the first window that has it and a token before it.

    Raises:
        ConfigError: a size is invalid, or the text is too short to score a token.
    """
    if size < 2:
        raise ConfigError(f"window must be at least 2 tokens, got {size}", "window")
    if not 1 <= stride <= size:
        raise ConfigError(f"stride must be from 1 to the window's {size} tokens", "stride")
    found, place, seen = [], 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + size, len(tokens))
        first = max(seen - begin, 1)
        if end - begin > first:
            found.append(Window(tokens[begin:end], first, place))
            place += end - begin - first
        seen = end
        if end == len(tokens):
            break
    if not found:
        raise ConfigError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}, but it needs at least 2, "
            "because the first one cannot be predicted",
            "data",
        )
    return found
