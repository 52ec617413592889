"""The text that a model reads while it is quantized."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.evaluate import check_vocabulary, read_text
from quire.text.tokenizer import Tokenizer

_HELD_OUT = 8
"""One sequence in so many is held out, to measure the outcome."""
_LEAST = 128
"""Sequences of calibration beside which others are held out: with fewer, as many are held out."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of calibration, int32 [n, length], and others held out, [m, length]."""

    sequences: Tensor
    held_out: Tensor


def built_in_text() -> str:
    """Returns the text that comes with Quire: its own documents, docstrings and code.

    `tools/make_calibration_text.py` makes it.
    """
    file = resources.files("quire.tools.quantize") / "calibration.jsonl.xz"
    lines = lzma.decompress(file.read_bytes()).splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


def calibration(
    tokenizer: Tokenizer, data: Path | None, samples: int, length: int, vocab_size: int
) -> Calibration:
    """Returns `samples` sequences of a text, or as many as it holds, and some held out.

    Args:
        tokenizer: the model's.
        data: a text file; None: the built-in text.
        samples: sequences to calibrate with, spread over the text.
        length: tokens of a sequence.
        vocab_size: the model's.

    Raises:
        ConfigError: the text is empty or too short, or has tokens beyond the model's vocabulary.
    """
    text = built_in_text() if data is None else read_text(data)
    tokens = torch.from_numpy(tokenizer.encode(text).copy())
    check_vocabulary(tokens.numpy(), vocab_size)
    count = len(tokens) // length
    if count < 2:
        raise ConfigError(
            f"the text has {len(tokens)} tokens: two sequences of {length} are the least",
            "data",
        )
    lines = tokens[: count * length].view(count, length)
    most = max(samples, _LEAST)
    wanted = min(count, most + most // (_HELD_OUT - 1))
    spread = torch.linspace(0, count - 1, wanted).long()
    every = min(_HELD_OUT, wanted)
    out = torch.arange(wanted) % every == every - 1
    rest = spread[~out]
    chosen = torch.linspace(0, len(rest) - 1, min(len(rest), samples)).long()
    return Calibration(lines[rest[chosen]], lines[spread[out]])
