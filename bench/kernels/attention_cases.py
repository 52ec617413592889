"""Paged attention: checks on mixed batches, and times at the shapes of real models."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from shapes import Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.layers.attention import KVLayout
from quire.ops import KVFormat, KVLayer, reference
from quire.ops.triton.attention.attention import (
    AttentionTuning,
    Tiles,
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
        """rows: (query length, context length). kv_format: of stored KV, by default dtype's."""
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

    def exact(self, **extra: object) -> Tensor:
        return reference.paged_attention(
            self.q[0].double(), widened(self.caches[0]), self.query_start, self.seq_lens,
            self.table.clamp(min=0), q_lens=self.q_lens, max_q_len=max(self.q_lens),
            max_seq_len=self.max_seq_len, scale=0.1, window=extra.get("window"),
            softcap=extra.get("softcap"), scratch=None,
        )  # fmt: skip

    def error(self, tuning: AttentionTuning, **extra: object) -> float:
        """The largest, in units of what the type allows."""
        got, want = self.run(0, tuning, **extra).double(), self.exact(**extra)
        dtype = self.q[0].dtype
        allowed = {torch.float32: 2e-5}.get(dtype, 3 * torch.finfo(dtype).eps)
        return float(((got - want).abs() / (allowed * (1 + want.abs()))).max())


def fill(tensors: list[Tensor]) -> None:
    """Values, of about one, and scales of tokens, if there are any."""
    values, *scales = tensors
    if values.dtype == torch.uint8:
        values.random_(1, 256)
    elif values.dtype == torch.float8_e4m3fn:
        values.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # up to 1.875
    else:
        values.normal_()
    for scale in scales:
        scale.uniform_(0.5, 1.5).mul_(0.01 if values.dtype == torch.uint8 else 1.0)


def widened(kv: KVLayer) -> KVLayer:
    """Returns the stored values in float64."""

    def values(x: Tensor, scale: Tensor | None) -> Tensor:
        x = x.float().double() - kv.format.offset
        if scale is None:
            return x
        return x * (scale[:, None, None] if scale.dim() == 1 else scale[..., None])

    return KVLayer(values(kv.k, kv.k_scale), values(kv.v, kv.v_scale))


MIXED = [(1, 1), (1, 777), (140, 140), (3, 200), (170, 900), (1, 16), (9, 9), (2, 1300), (1, 64)]
BEHIND = [(40, 2100), (1, 777), (20, 20), (23, 515), (2, 64), (16, 272)]
"""Few long rows, behind prefixes and without."""
SHORT = [(1, 1), (1, 400), (1, 1025), (1, 64), (1, 2000)]


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    """Name, and a function that gives the largest error in units of what the type allows."""

    def error(
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        tuning: AttentionTuning = AttentionTuning(),  # noqa: B008 (frozen)
        **extra: object,
    ) -> float:
        batch = Batch.make(rows, heads, kv_heads, dim, dtype=dtype)
        return batch.error(tuning, **extra)

    for heads, kv_heads, dim in ((16, 8, 128), (12, 2, 128), (32, 8, 128), (4, 4, 64), (8, 1, 256)):
        name = f"heads {heads}/{kv_heads} x {dim}"
        yield f"mixed, {name}", functools.partial(error, MIXED, heads, kv_heads, dim)
        yield f"decode, {name}", functools.partial(error, SHORT, heads, kv_heads, dim)
    yield "head size 80", functools.partial(error, MIXED, 4, 2, 80)
    yield "fp16, head size 96", functools.partial(error, MIXED, 4, 2, 96, torch.float16)
    yield "fp32", functools.partial(error, MIXED, 8, 2, 128, torch.float32)
    for heads, kv_heads, dim in ((12, 2, 128), (32, 8, 128), (4, 2, 80), (8, 1, 256)):
        name = f"few long rows, heads {heads}/{kv_heads} x {dim}"
        yield name, functools.partial(error, BEHIND, heads, kv_heads, dim)
        yield f"{name}, window", functools.partial(error, BEHIND, heads, kv_heads, dim, window=300)
    one, uncut = AttentionTuning(spread=1), AttentionTuning(spread=0)
    yield "few long rows in one part", functools.partial(error, BEHIND, 12, 2, 128, tuning=one)
    yield "few long rows uncut", functools.partial(error, BEHIND, 12, 2, 128, tuning=uncut)
    yield "window 100", functools.partial(error, MIXED, 8, 4, 128, window=100)
    yield "soft-cap 20", functools.partial(error, MIXED, 8, 4, 128, softcap=20.0)
    fixed, bare = AttentionTuning(fixed=True), AttentionTuning(pdl=False, upcast=True)
    yield "fixed path", functools.partial(error, MIXED, 8, 4, 128, tuning=fixed)
    yield "fallbacks", functools.partial(error, MIXED, 8, 4, 128, tuning=bare)


@dataclass(frozen=True)
class Row:
    """One line of the report. value: what unit says, of the best of `trials` as (config, µs)."""

    kernel: str
    model: str
    case: str
    value: float
    unit: str
    trials: tuple[tuple[str, float], ...]
    baseline: str = ""


DECODE = (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 2), Tiles(16, 32, 4, 4))
PREFILL = (
    Tiles(128, 64, 8, 3),
    Tiles(128, 64, 8, 2),
    Tiles(128, 128, 8, 2),
    Tiles(64, 64, 4, 2),
    Tiles(64, 128, 4, 2),
)


def name(tiles: Tiles) -> str:
    limit = "" if tiles.registers is None else f" r{tiles.registers}"
    return f"{tiles.m}x{tiles.n} w{tiles.warps} s{tiles.stages}{limit}"


def decode_contexts(case: str) -> list[int]:
    if case == "nano":
        draw = random.Random(1)
        return [draw.randint(300, 1500) for _ in range(256)]
    if case == "tail":  # what is left of nano
        draw = random.Random(2)
        return [draw.randint(900, 2000) for _ in range(64)]
    if case == "one long":
        return [1024] * 64 + [8192]
    known = {"b1": [384], "long": [8192], "b8": [8000] * 8, "b16": [8192] * 16, "b64": [640] * 64}
    return known[case]


def time_decode(shape: Shape, case: str, sweep: bool) -> Row:
    contexts = decode_contexts(case)
    bytes_ = sum(contexts) * shape.kv_bytes_per_token
    layers = copies_beyond_l2(bytes_)
    batch = Batch.make([(1, n) for n in contexts], shape.heads, shape.kv_heads, 128, layers)
    trials = []

    def trial(label: str, tuning: AttentionTuning) -> None:
        scratch = batch.schedule(tuning)
        calls = [
            functools.partial(batch.run, layer, tuning, scratch=scratch) for layer in range(layers)
        ]
        trials.append((label, graph_us(calls)))

    auto = AttentionTuning()
    trial("default", auto)
    trial("prefetch", replace(auto, prefetch=True))
    trial("no PDL", replace(auto, pdl=False))
    for programs in (0, 264, 528):
        trial(f"programs {programs}", replace(auto, programs=programs))
    for parts in (8, 16, 64) if case in ("b1", "b8", "long") else ():
        trial(f"parts {parts}", replace(auto, most_parts=parts))
    for tiles in DECODE if sweep else ():
        trial(name(tiles), replace(auto, decode=tiles))
        trial(f"{name(tiles)} uncut", replace(auto, decode=tiles, programs=0))
    best = min(us for _, us in trials)
    return Row("attention decode", shape.name, case, bytes_ / best / 1e6, "TB/s", tuple(trials))


BEHIND_A_PREFIX = {
    "64 behind 2083": [(64, 2147)],
    "64 behind 32768": [(64, 32832)],
    "64 behind 8192 among 64 x 1024": [(1, 1024)] * 64 + [(64, 8256)],
}


def time_prefix(shape: Shape, case: str, sweep: bool) -> Row:
    """A prompt most of which is cached, alone or among decodes."""
    rows = BEHIND_A_PREFIX[case]
    layers = copies_beyond_l2(sum(total for _, total in rows) * shape.kv_bytes_per_token)
    batch = Batch.make(rows, shape.heads, shape.kv_heads, 128, layers)
    flops = sum(4.0 * length * total * shape.heads * 128 for length, total in rows)
    tried = {"default": AttentionTuning(), "uncut": AttentionTuning(spread=0)}
    if sweep:
        tried |= {f"spread {n}": AttentionTuning(spread=n) for n in (66, 132, 264, 396)}
        tried |= {f"parts {n}": AttentionTuning(most_parts=n) for n in (4, 8, 16, 64)}
        for tiles in (*PREFILL[3:], Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 2)):
            for spread in (132, 264):
                tuning = AttentionTuning(prefill=tiles, spread=spread)
                tried[f"{name(tiles)} spread {spread}"] = tuning
    trials = []
    for label, tuning in tried.items():
        try:
            scratch = batch.schedule(tuning)
            calls = [
                functools.partial(batch.run, i, tuning, scratch=scratch) for i in range(layers)
            ]
            trials.append((label, graph_us(calls)))
        except Exception as error:  # a tile may not fit this card; the others still tell
            trials.append((f"{label}: {type(error).__name__}", float("inf")))
    best = min(us for _, us in trials)
    return Row(
        "attention prefix", shape.name, case, flops / best / 1e6, "TFLOP/s", tuple(trials)
    )  # fmt: skip


def cudnn_us(shape: Shape, tokens: int) -> float:
    """cuDNN's dense causal attention, for comparison."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = torch.randn(3, 1, shape.heads, tokens, 128, dtype=torch.bfloat16, device=DEVICE)
    attention = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_us([lambda: attention(q, k, v, is_causal=True)])


def time_prefill(shape: Shape, tokens: int, sweep: bool) -> Row:
    batch = Batch.make([(tokens, tokens)], shape.heads, shape.kv_heads, 128)
    flops = 2.0 * tokens * tokens * shape.heads * 128
    tried = [("default", AttentionTuning()), ("without wgmma", AttentionTuning(wgmma=False))]
    tried += [(name(t), AttentionTuning(prefill=t)) for t in PREFILL] if sweep else []
    trials = []
    for label, tuning in tried:
        try:
            trials.append((label, graph_us([functools.partial(batch.run, 0, tuning)])))
        except Exception as error:  # a tile may not fit this card; the others still tell
            trials.append((f"{label}: {type(error).__name__}", float("inf")))
    best = min(us for _, us in trials)
    try:
        baseline = f"cuDNN {flops / cudnn_us(shape, tokens) / 1e6:.0f}"
    except RuntimeError as error:
        baseline = f"cuDNN: {str(error)[:40]}"
    tflops = flops / best / 1e6
    return Row(
        "attention prefill", shape.name, str(tokens), tflops, "TFLOP/s", tuple(trials), baseline
    )
