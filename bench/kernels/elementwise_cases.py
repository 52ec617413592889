"""Times the kernels that only move bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from attention_cases import Row
from shapes import Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops import KVLayer
from quire.ops.triton import activation, norm
from quire.ops.triton.attention.rope_store import qk_norm_rope_store


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


class Rope:
    """T tokens between the projection and the cache."""

    def __init__(self, shape: Shape, tokens: int, copies: int = 1) -> None:
        self.qkv = random_bf16(copies, tokens, shape.heads + 2 * shape.kv_heads, 128)
        blocks = -(-tokens // 16) + 1
        self.cache = random_bf16(blocks, copies, 2, shape.kv_heads, 16, 128)
        angles = torch.outer(torch.arange(tokens + 1.0), 0.9 ** torch.arange(64.0))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
        self.positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.slots = torch.randperm(16 * blocks, device=DEVICE)[:tokens].int()
        self.weights = (random_bf16(128), random_bf16(128)) if shape.qk_norm else (None, None)

    def run(self, copy: int = 0, **tuning: object) -> Tensor:
        return qk_norm_rope_store(
            self.qkv[copy], KVLayer(self.cache[:, copy, 0], self.cache[:, copy, 1]),
            positions=self.positions, slots=self.slots, cos_sin=self.cos_sin,
            q_weight=self.weights[0], k_weight=self.weights[1], **tuning,  # type: ignore[arg-type]
        )  # fmt: skip


Trial = tuple[str, Callable[[int], object]]


def timed(
    kernel: str, model: str, tokens: int, bytes_: float, copies: int, variants: list[Trial]
) -> Row:
    """Times variants of a kernel, each a label and a call that takes the index of its buffers."""
    trials = tuple(
        (label, graph_us([functools.partial(call, i) for i in range(copies)]))
        for label, call in variants
    )
    return Row(kernel, model, str(tokens), bytes_ / trials[0][1] / 1e6, "TB/s", trials)


def time_all(shape: Shape, tokens: int) -> Iterator[Callable[[], Row]]:
    def rope() -> Row:
        bytes_ = 4 * tokens * shape.qkv_width
        copies = copies_beyond_l2(bytes_, 16)
        case = Rope(shape, tokens, copies)
        neighbours = functools.partial(case.run, interleaved=True)
        variants: list[Trial] = [("default", case.run), ("neighbours", neighbours)]
        return timed("rope + store", shape.name, tokens, bytes_, copies, variants)

    def norms() -> Row:
        bytes_ = 4 * tokens * shape.hidden
        copies = copies_beyond_l2(bytes_, 16)
        x = random_bf16(copies, tokens, shape.hidden)
        weight = random_bf16(shape.hidden)
        variants: list[Trial] = [
            ("RMSNorm", lambda i: norm.rms_norm(x[i], weight, 1e-6)),
        ]
        return timed("norm", shape.name, tokens, bytes_, copies, variants)

    def sums() -> Row:
        bytes_ = 6 * tokens * shape.hidden
        copies = copies_beyond_l2(bytes_, 16)
        x, residual = (random_bf16(copies, tokens, shape.hidden) for _ in range(2))
        weight = random_bf16(shape.hidden).float()
        variants: list[Trial] = [
            ("RMSNorm + residual", lambda i: norm.rms_norm(x[i], weight, 1e-6, residual[i])),
        ]
        return timed("norm + residual", shape.name, tokens, bytes_, copies, variants)

    def silu() -> Row:
        bytes_ = 6 * tokens * shape.intermediate
        copies = copies_beyond_l2(bytes_, 16)
        x = random_bf16(copies, tokens, 2 * shape.intermediate)
        variants: list[Trial] = [
            ("default", lambda i: activation.run(x[i], "silu_and_mul")),
            ("GELU", lambda i: activation.run(x[i], "gelu_tanh_and_mul")),
        ]
        return timed("SiLU·mul", shape.name, tokens, bytes_, copies, variants)

    yield from (rope, norms, sums, silu)
