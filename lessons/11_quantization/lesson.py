"""Rounds weights and activations to 8, 4 and fewer bits, and measures what that costs.

    python -m lessons 11 [--mine FILE]

1. One weight, rounded with a scale for the tensor, for each output, and for groups of inputs.
2. Activations with one large channel: a scale for all, for each token, and SmoothQuant's.
3. Your whole model with rounded weights, down to 2 bits: where it breaks.
4. Quire's formats: bytes of the layers, and perplexity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons import mine
from lessons.common import Loaded, check, load, own_model, parser, table
from quire.config import EngineArgs
from quire.models import build_model, model_quantization
from quire.tools.evaluate import measure_perplexity

STORY = Path(__file__).with_name("story.txt")
WINDOW, WINDOWS = 96, 4
"""Tokens that the model sees at once, and how often. More make the figures steadier."""
FORMATS = (None, "int8", "w8a8", "int4")


def rounded(x: Tensor, bits: int, group: int | None = 0) -> Tensor:
    """Rounds a matrix and back. group: inputs that share a scale; 0: a row's; None: all of them."""
    rows = x.reshape(1, -1) if group is None else x
    return mine.dequantize(*mine.quantize(rows, bits, group or 0)).view_as(x)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def one_weight(weight: Tensor) -> None:
    rows: list[list[Any]] = []
    for name, bits, group in (
        ("int8, a scale for all", 8, None), ("int8, a scale for each output", 8, 0),
        ("int4, a scale for all", 4, None), ("int4, a scale for each output", 4, 0),
        ("int4, groups of 64 inputs", 4, 64),
    ):  # fmt: skip
        rows.append([name, error(rounded(weight, bits, group), weight)])
    errors = [row[1] for row in rows]
    print(table(["weight", "error"], rows))
    check(errors[0] > errors[1] < errors[4], "8 bits: outputs with their own scales are closer")
    check(
        errors[2] > errors[3] > errors[4], "4 bits: the fewer weights share a scale, the closer\n"
    )


def activations(weight: Tensor) -> None:
    """Multiplies inputs of which one channel is 60 times the others, as large models have some."""
    x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 60
    x[0] *= 8  # and one token is larger than others
    exact, w8 = F.linear(x, weight), rounded(weight, 8)
    # SmoothQuant (Xiao et al. 2022): what is hard to round moves from inputs into the weight.
    factor = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    smooth = F.linear(rounded(x / factor, 8), rounded(weight * factor, 8))
    rows: list[list[Any]] = [
        ["fp32, 8-bit weight", error(F.linear(x, w8), exact)],
        ["int8, a scale for all", error(F.linear(rounded(x, 8, None), w8), exact)],
        ["int8, a scale for each token", error(F.linear(rounded(x, 8), w8), exact)],
        ["int8, each token, smoothed", error(smooth, exact)],
    ]
    errors = [row[1] for row in rows]
    print(table(["inputs", "error of the product"], rows))
    check(errors[1] > 2 * errors[2] > 4 * errors[3], "each helps: tokens' own scales, smoothing\n")


def whole_model(loaded: Loaded, windows: list[list[int]]) -> None:
    """Rounds all layers of the reader's model, and measures the perplexity over the windows."""

    def measure(model: mine.Model) -> float:
        logs = [math.log(mine.perplexity(model, ids)) for ids in windows]
        return math.exp(sum(logs) / len(logs))

    base, rows = measure(own_model(loaded)), list[list[Any]]()
    for bits in (8, 4, 2):
        found = measure(mine.Quantized(loaded.path, bits, group=64))
        rows.append([bits, base, found, f"{found / base - 1:+.1%}"])
    print(table(["my bits, groups of 64", "perplexity before", "after", "change"], rows))
    check(rows[0][2] < 1.01 * base and rows[1][2] < 1.05 * base, "8 and 4 bits: within 1 % and 5 %")
    check(rows[2][2] > 1.5 * base, "2 bits break the model\n")


def engine(loaded: Loaded) -> None:
    rows: list[list[Any]] = []
    for name in FORMATS:
        args = EngineArgs(model=str(loaded.path), quantization=name, kv_cache_gb=0.25)
        found = measure_perplexity(args, STORY, window=WINDOW, limit=WINDOW * WINDOWS).perplexity
        quantization = model_quantization(loaded.path, loaded.config, loaded.spec, name)
        build: dict[str, Any] = {
            "device": "meta",
            "dtype": torch.bfloat16,
            "quantization": quantization,
        }
        parameters = build_model(loaded.spec, **build).layers.parameters()
        change = found / rows[0][2] - 1 if rows else 0.0
        size = sum(each.nbytes for each in parameters) / 1e6
        rows.append([name or "bf16", size, found, f"{change:+.1%}"])
    print(table(["Quire's format", "MB of layers", "perplexity", "change"], rows))
    for name, _, found, _ in rows:
        check(abs(found / rows[0][2] - 1) < 0.05, f"{name}: within 5 %")


def main(arguments: Sequence[str] | None = None) -> None:
    loaded = load(parser(__doc__ or "").parse_args(arguments))
    weight = loaded.weights["model.layers.0.mlp.down_proj.weight"]
    one_weight(weight)
    activations(weight)
    ids = loaded.tokenizer.encode(STORY.read_text())[: WINDOW * WINDOWS].reshape(WINDOWS, WINDOW)
    whole_model(loaded, ids.tolist())
    engine(loaded)


if __name__ == "__main__":
    main(sys.argv[1:])
