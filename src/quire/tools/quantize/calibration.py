"""Collects statistics of the inputs of linear layers, and reads texts for calibration."""

from __future__ import annotations

import contextlib
import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.text.tokenizer import Tokenizer
from quire.tools.evaluate import check_vocabulary, read_text

_ROWS = 512
"""Number of tokens whose inputs are kept as they are."""


class InputStatistics:
    """Sums over the inputs [T, K] of a linear layer.

    Attributes:
        products: float32 [K, K], the sum of products x xᵀ.
        tops: float32 [K], the largest magnitudes.
        rows: [at most 512, K], inputs of tokens that are spread over the text.
        tokens: number of tokens so far.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.products = torch.zeros(inputs, inputs, device=device)
        self.sums = torch.zeros(inputs, device=device)
        self.tops = torch.zeros(inputs, device=device)
        self.tokens = 0
        self._parts: list[Tensor] = []

    def add(self, x: Tensor, share: float) -> None:
        """Adds inputs [T, K].

        Args:
            share: the fraction of all inputs that this call adds.
        """
        wide = x.detach().float()
        self.products.addmm_(wide.t(), wide)
        magnitudes = wide.abs()
        self.sums += magnitudes.sum(0)
        self.tops = torch.maximum(self.tops, magnitudes.amax(0))
        self.tokens += len(wide)
        kept = max(1, int(_ROWS * share))
        places = torch.linspace(0, len(wide) - 1, kept, device=x.device).long()
        self._parts.append(wide[places])

    @property
    def means(self) -> Tensor:
        """Returns the mean magnitudes [K]."""
        return self.sums / max(1, self.tokens)

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._parts)[:_ROWS]

    def scale(self, factors: Tensor) -> None:
        """Multiplies the inputs by factors [K], which changes all sums accordingly."""
        self.products *= factors.unsqueeze(0) * factors.unsqueeze(1)
        self.sums *= factors
        self.tops *= factors
        self._parts = [part * factors for part in self._parts]


@contextlib.contextmanager
def watch_inputs(block: nn.Module, share: float) -> Iterator[Mapping[str, InputStatistics]]:
    """Yields statistics of all linear layers of a block by name. Each call of the block adds to
    them.

    Args:
        share: the fraction of all inputs that one call adds.
    """
    found: dict[str, InputStatistics] = {}
    handles = []

    def watch(name: str, layer: Linear) -> None:
        statistics = found[name] = InputStatistics(layer.inputs, layer.weights[0].values.device)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0]
            norm = kwargs.get("norm")
            statistics.add(x if norm is None else norm(x), share)

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))

    for name, module in block.named_modules():
        if isinstance(module, Linear):
            watch(name, module)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# -- the text that a model reads while it is quantized -----------------------------------------

_HELD_OUT = 8
"""One sequence in this many is held out, to measure the result."""
_LEAST = 128
"""With fewer calibration sequences than this, the same number is held out."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens for calibration, and tokens that are held out.

    Attributes:
        sequences: int32 [n, length], for calibration.
        held_out: int32 [m, length], for measuring the result.
    """

    sequences: Tensor
    held_out: Tensor


def built_in_text() -> str:
    """Returns the text that ships with Quire: its documents, docstrings and code.

    `tools/make_calibration_text.py` makes it.
    """
    file = resources.files("quire.tools.quantize") / "calibration.jsonl.xz"
    lines = lzma.decompress(file.read_bytes()).splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


def calibration(
    tokenizer: Tokenizer, data: Path | None, samples: int, length: int, vocab_size: int
) -> Calibration:
    """Returns `samples` sequences of a text, or fewer if the text is short, and held-out sequences.

    Args:
        tokenizer: the model's tokenizer.
        data: a text file; None uses the built-in text.
        samples: number of sequences for calibration, which are spread over the text.
        length: tokens of a sequence.
        vocab_size: size of the model's vocabulary.

    Raises:
        ConfigError: the text is empty or too short, or has tokens beyond the model's vocabulary.
    """
    text = built_in_text() if data is None else read_text(data)
    tokens = torch.from_numpy(tokenizer.encode(text).copy())
    check_vocabulary(tokens.numpy(), vocab_size)
    count = len(tokens) // length
    if count < 2:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, but it needs two sequences of {length}",
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
