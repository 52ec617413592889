"""Ceilings of devices: the denominators of bandwidth utilization and MFU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of one device.

    Attributes:
        memory: bytes/s.
        matmul: FLOP/s of dense 16-bit products summed in fp32.
        origin: measured, or the maker's data sheet, which no kernel reaches.
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

    None where they are not known, and for 32-bit models, which use other units.
    """
    return None if dtype == "float32" else _CEILINGS.get(card)


_READ_BYTES = 256 << 20
_SIDE = 1024
"""Rows and columns of the matrices that a CPU multiplies to show its rate."""
_TRIES = 5


def measured_on_cpu(dtype: str) -> Ceilings:
    """Measures this CPU's ceilings, which takes less than a second: a sum over more than its caches
    hold, and a product of matrices."""
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
