"""Bytes and FLOPs that a step cannot do without, from the model's shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Least traffic and arithmetic. Weights are read once a step; activations stay in caches.

    body_bytes, head_bytes: weights of all layers, and of the head. body_flops: of the linear
    layers, per token. head_flops: per row of logits. embedding_bytes: read per token.
    windows: (window or None, layers with it). kv_bytes: of one token in one layer. pair_flops: of
    one query attending to one key, over all heads of one layer.
    """

    body_bytes: int
    head_bytes: int
    body_flops: int
    head_flops: int
    embedding_bytes: int
    windows: tuple[tuple[int | None, int], ...]
    kv_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, config: EngineConfig) -> ModelWork:
        """From a model without weights. With several ranks, the work of one of them."""
        import torch

        from quire.engine.ranks import model_of_rank
        from quire.layers.linear import Linear
        from quire.models import load_config, model_quantization, spec_from_config

        hf_config = load_config(config.model_path)
        spec = spec_from_config(hf_config)
        dtype = getattr(torch, config.dtype)
        quantization = model_quantization(
            config.model_path, hf_config, spec, config.args.quantization
        )
        world = config.args.tensor_parallel_size
        model = model_of_rank(spec, quantization, world, dtype)
        head = spec.vocab_size * spec.hidden_size // world
        outside = {"embedding", "positions", "head"}
        body_bytes = sum(
            parameter.numel() * parameter.dtype.itemsize
            for name, parameter in model.named_parameters()
            if name.partition(".")[0] not in outside
        )
        products = sum(
            (module.columns[1] - module.columns[0]) * sum(module.sizes)
            for module in model.layers.modules()
            if isinstance(module, Linear)
        )
        attention = spec.attention[0]
        return cls(
            body_bytes=body_bytes,
            head_bytes=head * dtype.itemsize,
            body_flops=2 * products,
            head_flops=2 * head,
            embedding_bytes=spec.hidden_size * dtype.itemsize,
            windows=tuple(Counter(map(spec.window, spec.attention)).items()),
            kv_bytes=2 * max(1, attention.kv_heads // world) * attention.head_dim * dtype.itemsize,
            pair_flops=4 * attention.heads * attention.head_dim // world,
        )

    def of_step(self, first: Int32, count: Int32, logit_rows: int) -> tuple[float, float]:
        """(bytes, FLOPs) of a step; its rows compute `count` positions from `first`, int32 [R]."""
        parts = self.parts_of_step(first, count, logit_rows).values()
        return float(sum(part[0] for part in parts)), float(sum(part[1] for part in parts))

    def parts_of_step(
        self, first: Int32, count: Int32, logit_rows: int
    ) -> dict[str, tuple[float, float]]:
        """Returns (bytes, FLOPs) of a step by kind of kernel."""
        tokens = int(count.sum())
        bytes_ = flops = 0.0
        for window, layers in self.windows:
            seen, pairs = attended(first, count, window)
            bytes_ += layers * (seen + tokens) * self.kv_bytes
            flops += layers * pairs * self.pair_flops
        return {
            "projections": (self.body_bytes, tokens * self.body_flops),
            "attention": (bytes_, flops),
            "embedding": (tokens * self.embedding_bytes, 0.0),
            "head": (self.head_bytes if logit_rows else 0, logit_rows * self.head_flops),
        }


def attended(first: Int32, count: Int32, window: int | None) -> tuple[int, int]:
    """(positions that the rows' queries read, each once a row; pairs of query and key), for queries
    at `first` to `first + count - 1` that see themselves and what is before, `window` at most."""
    start, n = first.astype(np.int64), count.astype(np.int64)
    if window is None:
        return int((start + n).sum()), int((n * start + n * (n + 1) // 2).sum())
    # The first `short` queries see all that is before them, the others just the window.
    short = np.clip(window - start, 0, n)
    pairs = short * start + short * (short + 1) // 2 + (n - short) * window
    return int(np.minimum(start + n, window + n - 1).sum()), int(pairs.sum())


def percent_of(amount: float, seconds: float, ceiling: float) -> float:
    return 100.0 * amount / (seconds * ceiling)


def percentiles(values: Sequence[float], *wanted: int) -> list[float]:
    """Linear interpolation between the nearest values."""
    return [float(value) for value in np.percentile(values, wanted)]
