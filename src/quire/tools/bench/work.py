"""Ceilings of devices, for bandwidth utilization and MFU, and the least work of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.arrays import Int32


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of one device.

    Attributes:
        memory: bytes/s.
        matmul: FLOP/s of dense 16-bit products summed in fp32.
        origin: whether the numbers are measured or from a data sheet, which no kernel reaches.
    """

    memory: float
    matmul: float
    origin: str

    def described(self) -> dict[str, float | str]:
        return {
            "memory_tb_s": self.memory / 1e12,
            "matmul_tflop_s": self.matmul / 1e12,
            "origin": self.origin,
        }


def _sheet(terabytes: float, teraflops: float) -> Ceilings:
    return Ceilings(terabytes * 1e12, teraflops * 1e12, "data sheet")


_CEILINGS = {
    "NVIDIA H200": Ceilings(4.25e12, 700e12, "measured"),
    "NVIDIA B200": _sheet(8.0, 2250),
    "NVIDIA H100 80GB HBM3": _sheet(3.35, 989),
    "NVIDIA H100 PCIe": _sheet(2.0, 756),
    "NVIDIA H100 NVL": _sheet(3.9, 835),
    "NVIDIA A100-SXM4-80GB": _sheet(2.039, 312),
    "NVIDIA A100-SXM4-40GB": _sheet(1.555, 312),
    "NVIDIA A100 80GB PCIe": _sheet(1.935, 312),
    "NVIDIA L40S": _sheet(0.864, 362),
    "NVIDIA L4": _sheet(0.300, 121),
    "NVIDIA A10G": _sheet(0.600, 70),
    "NVIDIA A10": _sheet(0.600, 125),
    "NVIDIA GeForce RTX 4090": _sheet(1.008, 165),
    "NVIDIA GeForce RTX 3090": _sheet(0.936, 71),
    "Tesla T4": _sheet(0.320, 65),
}


def ceilings(card: str, dtype: str) -> Ceilings | None:
    """Returns the ceilings of the card that torch calls `card`.

    Returns None if they are unknown, and for 32-bit models, which use other units of the card.
    """
    return None if dtype == "float32" else _CEILINGS.get(card)


_READ_BYTES = 256 << 20
_SIDE = 1024
"""Rows and columns of the matrices by which a CPU's rate is measured."""
_TRIES = 5


def measured_on_cpu(dtype: str) -> Ceilings:
    """Measures this CPU's ceilings in less than a second.

    It times a sum over more data than the caches hold, and a product of matrices."""
    # Imported here because `quire bench throughput --help` imports this module without PyTorch.
    import torch

    many = torch.ones(_READ_BYTES // 4)
    a, b = torch.rand(2, _SIDE, _SIDE).to(getattr(torch, dtype))

    def fastest(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return Ceilings(
        _READ_BYTES / fastest(many.sum), 2 * _SIDE**3 / fastest(lambda: a @ b), "measured now"
    )


# -- the least bytes and FLOPs of a step, from the model's shapes -------------------------------


Products = Literal["plain", "integers", "floats", "rounded", "blocks"]
"""Uses of weights by products: as they are; widened, from integers or from floats; with inputs in
as few bits, which have a scale per token, or one per token and group."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The least work of one attention layer.

    Attributes:
        window: tokens of the window, or None.
        kv_bytes: bytes of one token's KV.
        pair_flops: FLOPs of one query that attends to one key, over all heads.
    """

    window: int | None
    kv_bytes: int
    pair_flops: int


@dataclass(frozen=True, slots=True)
class ExpertsWork:
    """The least work of the experts of all layers.

    Attributes:
        layers: number of layers with experts.
        bytes: bytes of all experts' weights.
        share: fraction of the experts that one token uses.
        flops: FLOPs per token.
    """

    layers: int = 0
    bytes: int = 0
    share: float = 0.0
    flops: float = 0.0

    def touched(self, tokens: int) -> float:
        """Returns the bytes of the experts that `tokens` tokens use, if all are equally likely."""
        return self.bytes * float(1.0 - (1.0 - self.share) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The least traffic and arithmetic of steps.

    Weights are read once per step. Activations are assumed to stay in caches.

    Attributes:
        body_bytes: weights of all layers without their experts.
        head_bytes: weights of the head.
        body_flops: FLOPs of the `linear_layers` linear layers per token.
        head_flops: FLOPs of the head per row of logits.
        embedding_bytes: bytes of embeddings read per token.
        tied: whether the head's weights are the embeddings.
        body_products: products of most of the layers' weights.
        head_products: products of the head.
        attention: each kind of attention layer, and the number of such layers.
        state_bytes: recurrent states of one request, over all `state_layers`.
        state_flops: FLOPs of the recurrent states per token.
    """

    body_bytes: int
    head_bytes: int
    body_flops: int
    head_flops: int
    embedding_bytes: int
    linear_layers: int
    attention: tuple[tuple[AttentionWork, int], ...]
    experts: ExpertsWork = ExpertsWork()
    state_layers: int = 0
    state_bytes: int = 0
    state_flops: int = 0
    tied: bool = False
    body_products: Products = "plain"
    head_products: Products = "plain"

    @property
    def attention_layers(self) -> int:
        return sum(layers for _, layers in self.attention)

    def of_step(self, first: Int32, count: Int32, logit_rows: int) -> tuple[float, float]:
        """Returns (bytes, FLOPs) of a step.

        Args:
            first: int32 [R], the first position that each row computes.
            count: int32 [R], number of positions of each row.
            logit_rows: number of rows of logits.
        """
        parts = self.parts_of_step(first, count, logit_rows).values()
        return float(sum(part[0] for part in parts)), float(sum(part[1] for part in parts))

    def parts_of_step(
        self, first: Int32, count: Int32, logit_rows: int
    ) -> dict[str, tuple[float, float]]:
        """Returns (bytes, FLOPs) of a step for each kind of kernel that the model has."""
        tokens = int(count.sum())
        bytes_ = flops = 0.0
        for work, layers in self.attention:
            seen, pairs = attended(first, count, work.window)
            bytes_ += layers * (seen + tokens) * work.kv_bytes
            flops += layers * pairs * work.pair_flops
        parts = {
            "projections": (self.body_bytes, tokens * self.body_flops),
            "attention": (bytes_, flops),
            "experts": (self.experts.touched(tokens), tokens * self.experts.flops),
            # A state is read and written once per step.
            "states": (2 * len(count) * self.state_bytes, tokens * self.state_flops),
            "embedding": (tokens * self.embedding_bytes, 0.0),
            "head": (self.head_bytes if logit_rows else 0, logit_rows * self.head_flops),
        }
        present = {
            "attention": self.attention_layers,
            "experts": self.experts.layers,
            "states": self.state_layers,
        }
        return {name: part for name, part in parts.items() if present.get(name, 1)}

    def held_bytes(self, tokens: int, requests: int) -> int:
        """Returns the bytes of KV and states of `requests` requests with `tokens` tokens in all.

        KV that has left a window does not count."""
        kept = sum(layers * work.kv_bytes for work, layers in self.attention)
        return tokens * kept + requests * self.state_bytes


def attended(first: Int32, count: Int32, window: int | None) -> tuple[int, int]:
    """Returns the number of positions that the rows' queries read, and the number of pairs of a
    query and a key.

    A row's queries are at `first` to `first + count - 1`. A query sees itself and the positions
    before it, at most `window` in all. A position counts once for each row."""
    start, n = first.astype(np.int64), count.astype(np.int64)
    if window is None:
        return int((start + n).sum()), int((n * start + n * (n + 1) // 2).sum())
    # The first `short` queries see all positions before them, the others only the window.
    short = np.clip(window - start, 0, n)
    pairs = short * start + short * (short + 1) // 2 + (n - short) * window
    return int(np.minimum(start + n, window + n - 1).sum()), int(pairs.sum())


def percent_of(amount: float, seconds: float, ceiling: float) -> float:
    return 100.0 * amount / (seconds * ceiling)


def percentiles(values: Sequence[float], *wanted: int) -> list[float]:
    """Returns percentiles by linear interpolation between the nearest values."""
    return [float(value) for value in np.percentile(values, wanted)]
