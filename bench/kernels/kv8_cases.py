"""Compares attention over 8-bit KV, and the store of it, with float64 twins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from attention_cases import BEHIND, MIXED, SHORT, Batch
from shapes import QWEN25_1_5B, Shape
from timing import DEVICE
from torch import Tensor

from quire.ops import KVFormat, KVLayer, reference
from quire.ops.triton.attention.attention import AttentionTuning
from quire.ops.triton.attention.rope_store import qk_norm_rope_store

FORMATS = {
    "fp8": KVFormat(torch.float8_e4m3fn, "head"),
    "fp8_dynamic": KVFormat(torch.float8_e4m3fn, "token"),
    "int8": KVFormat(torch.uint8, "token"),
}
AUTO = AttentionTuning()


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields names, and functions that return the largest error in units of bf16's tolerance."""

    def error(
        kv_format: KVFormat,
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        tuning: AttentionTuning = AUTO,
        dtype: torch.dtype = torch.bfloat16,
        **extra: object,
    ) -> float:
        batch = Batch.make(rows, heads, kv_heads, dim, dtype=dtype, kv_format=kv_format)
        return batch.error(tuning, **extra)

    for kind, kv_format in FORMATS.items():
        check = functools.partial(error, kv_format)
        for heads, kv_heads, dim in ((12, 2, 128), (16, 8, 128), (4, 4, 64), (8, 1, 256)):
            shape = heads, kv_heads, dim
            yield f"{kind}, mixed {shape}", functools.partial(check, MIXED, *shape)
            yield f"{kind}, decode {shape}", functools.partial(check, SHORT, *shape)
        mixed = functools.partial(check, MIXED, 8, 4, 128)
        few = functools.partial(check, BEHIND, 12, 2, 128)
        yield f"{kind}, few long rows", few
        yield f"{kind}, few long rows, window", functools.partial(few, window=300)
        yield f"{kind}, head size 80", functools.partial(check, MIXED, 4, 2, 80)
        yield f"{kind}, fp16", functools.partial(mixed, dtype=torch.float16)
        yield f"{kind}, window", functools.partial(mixed, window=100)
        yield f"{kind}, soft-cap", functools.partial(mixed, softcap=20.0)
        yield f"{kind}, fixed path", functools.partial(mixed, AttentionTuning(fixed=True))
        yield f"{kind}, store", functools.partial(store_error, kv_format)


class Store:
    """Tokens between the projection and an 8-bit cache."""

    def __init__(self, shape: Shape, tokens: int, kv_format: KVFormat, copies: int = 1) -> None:
        heads = shape.heads + 2 * shape.kv_heads
        self.qkv = torch.randn(copies, tokens, heads, 128, device=DEVICE).bfloat16()
        self.kv_format = kv_format
        blocks = -(-tokens // 16) + 1
        size = blocks, copies, 2, shape.kv_heads, 16
        self.values = torch.zeros((*size, 128), dtype=kv_format.dtype, device=DEVICE)
        self.scales = torch.zeros(size, device=DEVICE)
        if kv_format.scales == "head":
            self.scales = torch.full((copies, 2, shape.kv_heads), 0.01, device=DEVICE)
        angles = torch.outer(torch.arange(tokens + 1.0), 0.9 ** torch.arange(64.0))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
        self.positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.slots = torch.randperm(16 * blocks, device=DEVICE)[:tokens].int()

    def layer(self, copy: int) -> KVLayer:
        own: tuple[Tensor | None, Tensor | None] = None, None
        if self.kv_format.scales == "token":
            own = self.scales[:, copy, 0], self.scales[:, copy, 1]
        elif self.kv_format.scales == "head":
            own = self.scales[copy, 0], self.scales[copy, 1]
        return KVLayer(self.values[:, copy, 0], self.values[:, copy, 1], *own)

    def run(self, copy: int = 0) -> Tensor:
        return qk_norm_rope_store(
            self.qkv[copy], self.layer(copy), positions=self.positions, slots=self.slots,
            cos_sin=self.cos_sin,
        )  # fmt: skip

    def stored(self) -> Tensor:
        """k and v of the tokens, [tokens, 2, kv_heads, 128]."""
        slots = self.slots.long()
        values = self.values[slots // 16, 0, :, :, slots % 16].float() - self.kv_format.offset
        if self.kv_format.scales == "token":
            return values * self.scales[slots // 16, 0, :, :, slots % 16][..., None]
        return (
            values * self.scales[0][None, ..., None] if self.kv_format.scales == "head" else values
        )


def store_error(kv_format: KVFormat) -> float:
    """Returns the error in units of half a step between stored numbers plus bf16's error."""
    case = Store(QWEN25_1_5B, 300, kv_format)
    case.run()
    found = case.stored()
    exact = Store(QWEN25_1_5B, 300, KVFormat(torch.float64))
    exact.qkv, exact.slots = case.qkv.double(), case.slots
    reference.qk_norm_rope_store(
        exact.qkv[0], exact.layer(0), positions=exact.positions, slots=exact.slots,
        cos_sin=exact.cos_sin.double(), q_weight=None, k_weight=None, eps=0.0, scratch=None,
    )  # fmt: skip
    slots = exact.slots.long()
    want = exact.values[slots // 16, 0, :, :, slots % 16]
    top = want.abs().amax(-1, keepdim=True)
    half = top / 254 if kv_format.offset else want.abs() / 16 + top / 448 / 1024
    limit = 448 * 0.01 if kv_format.scales == "head" else torch.inf
    want = want.clamp(-limit, limit)
    return float(((found - want).abs() / (1.01 * half + 1e-5 * top + 1e-6)).max())
