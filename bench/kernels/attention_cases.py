"""Times paged attention at the shapes of real models."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from shapes import Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.layers.attention import KVLayout
from quire.ops import KVFormat, KVLayer
from quire.ops.triton.attention.attention import (
    AttentionTuning,
    attention_schedule,
    paged_attention,
)
from quire.plan import KVGroup
from quire.runner.kv_cache import KVCache

BLOCK_SIZE = 16


@dataclass
class Batch:
    """A batch over caches laid out as the engine's: one block holds all layers."""

    q: list[Tensor]
    caches: list[KVLayer]
    query_start: Tensor
    seq_lens: Tensor
    table: Tensor
    q_lens: tuple[int, ...]
    max_seq_len: int

    @classmethod
    def make(
        cls,
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        kv_format: KVFormat | None = None,
    ) -> Batch:
        """Returns a random batch.

        Args:
            rows: (query length, context length) of each request.
            kv_format: format of stored KV. None is the format of `dtype`.
        """
        widths = [-(-total // BLOCK_SIZE) for _, total in rows]
        blocks = sum(widths) + 1
        order = torch.randperm(blocks - 1) + 1
        table = torch.full((len(rows), max(widths)), -1, dtype=torch.int32)
        at = 0
        for row, width in enumerate(widths):
            table[row, :width] = order[at : at + width]
            at += width
        kv_format = kv_format or KVFormat(dtype)
        fixed = torch.rand(layers, 2, kv_heads, device=DEVICE) + 0.5
        cache = KVCache(
            [KVGroup(tuple(range(layers)), tokens_per_block=BLOCK_SIZE)], [blocks],
            layouts=[KVLayout(kv_heads, dim, heads)], kv_format=kv_format,
            device=torch.device(DEVICE), head_scales=fixed if kv_format.scales == "head" else None,
        )  # fmt: skip
        fill(cache.block_tensors(0))
        tokens = sum(q for q, _ in rows)
        q = torch.randn(layers, tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE)
        starts = torch.tensor([0, *(q for q, _ in rows)]).cumsum(0).int()
        return cls(
            q=[q[layer][:, :heads] for layer in range(layers)],
            caches=cache.layers,
            query_start=starts.to(DEVICE),
            seq_lens=torch.tensor([total for _, total in rows], dtype=torch.int32, device=DEVICE),
            table=table.to(DEVICE),
            q_lens=tuple(q for q, _ in rows),
            max_seq_len=max(total for _, total in rows),
        )

    def schedule(self, tuning: AttentionTuning) -> dict[str, object]:
        """Returns the inputs that a step makes once for all its layers."""
        q, kv = self.q[0], self.caches[0]
        made = attention_schedule(
            self.query_start, self.seq_lens, heads=q.shape[1], kv_heads=kv.k.shape[1],
            head_dim=q.shape[2], dtype=q.dtype, kv_format=kv.format, tokens=q.shape[0],
            max_q_len=max(self.q_lens), tuning=tuning,
        )  # fmt: skip
        torch.cuda.synchronize()
        return {"schedule": made}

    def run(self, layer: int, tuning: AttentionTuning, **extra: object) -> Tensor:
        return paged_attention(
            self.q[layer], self.caches[layer], self.query_start, self.seq_lens, self.table,
            max_q_len=max(self.q_lens), max_seq_len=self.max_seq_len, scale=0.1,
            tuning=tuning, **extra,  # type: ignore[arg-type]
        )  # fmt: skip


def fill(tensors: list[Tensor]) -> None:
    """Draws values of about one, and the scales of tokens if there are any."""
    values, *scales = tensors
    if values.dtype == torch.uint8:
        values.random_(1, 256)
    elif values.dtype == torch.float8_e4m3fn:
        values.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # up to 1.875
    else:
        values.normal_()
    for scale in scales:
        scale.uniform_(0.5, 1.5).mul_(0.01 if values.dtype == torch.uint8 else 1.0)


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        value: in `unit`, of the first trial.
        trials: names and µs; the first is what the engine runs.
        baseline: another library's figure.
    """

    kernel: str
    model: str
    case: str
    value: float
    unit: str
    trials: tuple[tuple[str, float], ...]
    baseline: str = ""


CONTEXTS = {
    "b1": [384], "long": [8192], "b8": [8000] * 8, "8 x 640": [640] * 8, "b16": [8192] * 16,
    "b64": [640] * 64, "64 short": [150] * 64, "one long": [1024] * 64 + [8192],
}  # fmt: skip
"""Contexts of a decode step's requests, by case; `decode_contexts` draws others."""
BEHIND_A_PREFIX = {
    "64 behind 2083": [(64, 2147)],
    "64 behind 32768": [(64, 32832)],
    "64 behind 8192 among 64 x 1024": [(1, 1024)] * 64 + [(64, 8256)],
}
"""(query length, context length) of a prompt most of which is cached, alone or among decodes."""
TUNINGS = {"default": AttentionTuning(), "deterministic": AttentionTuning(fixed=True)}


def decode_contexts(case: str) -> list[int]:
    """Returns the contexts of a case. `nano` is a step of that benchmark, `tail` one of its end."""
    if case == "nano":
        draw = random.Random(1)
        return [draw.randint(300, 1500) for _ in range(256)]
    if case == "tail":
        draw = random.Random(2)
        return [draw.randint(900, 2000) for _ in range(64)]
    return CONTEXTS[case]


def times(batch: Batch, tunings: dict[str, AttentionTuning]) -> tuple[tuple[str, float], ...]:
    """Returns the µs of a layer's attention by each tuning."""
    found = []
    for label, tuning in tunings.items():
        scratch = batch.schedule(tuning)
        calls = [
            functools.partial(batch.run, layer, tuning, scratch=scratch)
            for layer in range(len(batch.q))
        ]
        found.append((label, graph_us(calls)))
    return tuple(found)


def time_decode(shape: Shape, case: str) -> Row:
    contexts = decode_contexts(case)
    bytes_ = sum(contexts) * shape.kv_bytes_per_token
    rows = [(1, total) for total in contexts]
    batch = Batch.make(rows, shape.heads, shape.kv_heads, 128, copies_beyond_l2(bytes_))
    trials = times(batch, TUNINGS)
    return Row("attention decode", shape.name, case, bytes_ / trials[0][1] / 1e6, "TB/s", trials)


def time_prefix(shape: Shape, case: str) -> Row:
    rows = BEHIND_A_PREFIX[case]
    layers = copies_beyond_l2(sum(total for _, total in rows) * shape.kv_bytes_per_token)
    batch = Batch.make(rows, shape.heads, shape.kv_heads, 128, layers)
    flops = sum(4.0 * length * total * shape.heads * 128 for length, total in rows)
    trials = times(batch, {"default": AttentionTuning(), "uncut": AttentionTuning(spread=0)})
    rate = flops / trials[0][1] / 1e6
    return Row("attention prefix", shape.name, case, rate, "TFLOP/s", trials)


def time_prefill(shape: Shape, tokens: int) -> Row:
    batch = Batch.make([(tokens, tokens)], shape.heads, shape.kv_heads, 128)
    flops = 2.0 * tokens * tokens * shape.heads * 128
    trials = times(batch, {**TUNINGS, "without wgmma": AttentionTuning(wgmma=False)})
    rate = flops / trials[0][1] / 1e6
    return Row("attention prefill", shape.name, str(tokens), rate, "TFLOP/s", trials)
