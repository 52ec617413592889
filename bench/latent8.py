"""Measures how far attention over latents in 8 bits is from attention over them as they are.

    python bench/latent8.py [--output bench/results/latent8.jsonl]

Random queries and tokens of DeepSeek-V3's sizes (latents of 512 numbers behind a norm, rotated keys
of 64), all in float64 but for what is stored. Keys have `outliers` times larger numbers in four
dimensions, as keys in front of rotary positions have. Printed is the error of the heads' means,
relative to their norm: with latents alone in 8 bits, and with keys in 8 bits under a token's own
scale, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from quire.ops import kv_format
from quire.ops.reference import kv8
from quire.tools.bench.record import make_record
from tables import print_and_append

HEADS, RANK, KEY, TOKENS, QUERIES = 16, 512, 64, 2048, 8
NAMES = ("fp8_e4m3", "fp8_dynamic", "int8")


def attend(q: Tensor, latents: Tensor, keys: Tensor) -> Tensor:
    """Returns means of latents, [QUERIES * HEADS, RANK]."""
    scores = q @ torch.cat([latents, keys], 1).T / (128 + KEY) ** 0.5
    return scores.softmax(-1) @ latents


def rounded(x: Tensor, name: str) -> Tensor:
    """Returns x [n, width] as the cache stores it, with a fixed scale of 1."""
    form = kv_format(name, torch.bfloat16)
    stored, scale = kv8.quantize(x.unsqueeze(1), form, torch.ones(1))
    return kv8.dequantize(stored, scale, form, torch.float64).squeeze(1)


def errors(name: str, outliers: float) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(TOKENS, RANK, generator=draw, dtype=torch.float64)
    keys = torch.randn(TOKENS, KEY, generator=draw, dtype=torch.float64)
    keys[:, ::16] *= outliers
    q = torch.randn(QUERIES * HEADS, RANK + KEY, generator=draw, dtype=torch.float64)
    q[:, :RANK] *= (128 / RANK) ** 0.5  # as if absorbed from keys of 128 numbers
    exact = attend(q, latents, keys)
    latents8, near = rounded(latents, name), keys.bfloat16().double()
    found = {
        "latents_error": attend(q, latents8, near) - exact,
        "latents_and_keys_error": attend(q, latents8, rounded(keys, name)) - exact,
        "bf16_error": attend(q, latents.bfloat16().double(), near) - exact,
    }
    return {key: float(each.norm() / exact.norm()) for key, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="a JSONL file to append records to")
    args = parser.parse_args()
    records = [
        make_record(f"latents in 8 bits, {name}", errors(name, outliers) | {"outliers": outliers})
        for name in NAMES
        for outliers in (1.0, 8.0)
    ]
    print_and_append(records, args.output)


if __name__ == "__main__":
    main()
