"""Table of the memory that models need, from the sizes that `quire info` shows, for `report.py`."""

from __future__ import annotations

from functools import cache

from quire.cli.info import model_section
from quire.config import EngineArgs
from quire.engine.builder import resolve
from tables import CONFIGS, table

MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B", "qwen2.5-1.5b": "Qwen2.5-1.5B", "gemma2-2b": "Gemma 2 2B",
    "llama-2-7b": "Llama-2-7B", "qwen3-8b": "Qwen3-8B", "gpt-oss-20b": "gpt-oss-20b (MXFP4)",
    "qwen3.5-27b": "Qwen3.5-27B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-32b": "Qwen3-32B",
    "llama-3.1-70b": "Llama-3.1-70B",
}  # fmt: skip
"""Folder of `configs`, and name."""
CARDS = (24, 48, 80, 141)
"""Memory of cards, in GB."""
SHARE = 0.9
"""Default of `--gpu-memory-utilization`."""
RESERVE = 5
"""GB for activations and logits."""


def section(folder: str, quantization: str | None) -> dict[str, float]:
    args = EngineArgs.from_kwargs(
        model=str(CONFIGS / folder), device="cpu", dtype="bfloat16", load_format="dummy",
        skip_tokenizer_init=True, quantization=quantization,
    )  # fmt: skip
    return model_section(resolve(args))


@cache
def memory() -> str:
    """Returns weights in three formats, KV of 1000 tokens, and the tokens that fit each card."""
    rows = []
    for folder, name in MODELS.items():
        packed = folder == "gpt-oss-20b"
        formats = (None,) if packed else (None, "fp8", "int4")
        found = {kind: section(folder, kind) for kind in formats}
        weights = [f"{found[kind]['weight_bytes'] / 1e9:.1f}" if kind in found else "–"
                   for kind in (None, "fp8", "int4")]  # fmt: skip
        plain = found[None]
        per_token = plain["kv_bytes_per_token"]
        cells = []
        for card in CARDS:
            room = card * SHARE - RESERVE - plain["weight_bytes"] / 1e9
            cells.append(f"{1e6 * room / per_token:,.0f} k" if room > 0.2 else "–")
        rows.append([name, *weights, f"{per_token / 1e6:.3f}", *cells])
    header = ["model", "weights in bf16, GB", "fp8", "int4", "KV of 1000 tokens, GB"]
    return table([*header, *(f"KV tokens on {card} GB" for card in CARDS)], rows)
