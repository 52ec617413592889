"""8-bit KV: stored bytes, and attention over them, by kernels and by the reference, against float64
twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops import KVFormat, KVLayer, reference
from quire.ops.triton.attention.attention import AttentionTuning, Tiles, paged_attention
from quire.ops.triton.attention.rope_store import qk_norm_rope_store
from tests.ops.test_triton_attention import MIXED, SMALL, Case, twin
from tests.slow import slow

FORMATS = {
    "fp8": KVFormat(torch.float8_e4m3fn, "head"),
    "fp8_dynamic": KVFormat(torch.float8_e4m3fn, "token"),
    "int8": KVFormat(torch.uint8, "token"),
}
formats = pytest.mark.parametrize("kv_format", FORMATS.values(), ids=FORMATS)
both_scales = pytest.mark.parametrize(
    "kv_format", [FORMATS["fp8"], slow(FORMATS["fp8_dynamic"]), FORMATS["int8"]], ids=FORMATS
)
"""Scales of heads and scales of tokens, for tests of how rows are cut into parts."""


def quantized(x: Tensor, kv_format: KVFormat, head_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [blocks, heads, size, dim] in `kv_format`, and the scales of its tokens and heads,
    in float64 but for the last rounding."""
    x = x.double()
    scale = head_scale.double()[None, :, None].expand(x.shape[:-1])
    if kv_format.scales == "token":
        scale = (x.abs().amax(-1).clamp(min=1e-20) / kv_format.largest).float().double()
    scaled = (x / scale[..., None]).clamp(-kv_format.largest, kv_format.largest)
    if kv_format.offset:
        scaled = scaled.round() + 128
    return scaled.float().to(kv_format.dtype), scale


class Stored(Case):
    """A mixed batch over a cache in 8 bits; `exact` holds the values of the bytes."""

    # Weights, and fp32 queries, are rounded to fp16.
    allowed = 4e-3

    def __init__(self, kv_format: KVFormat, device: str, *args: object, **keywords: object) -> None:
        super().__init__(device, *args, **keywords)  # type: ignore[arg-type]
        wide = self.kv
        heads = wide.k.shape[1]
        made, exact, scales = [], [], []
        make = torch.Generator().manual_seed(len(wide.k))
        for i, x in enumerate((wide.k, wide.v)):
            head_scale = torch.linspace(0.01, 0.02, heads, device=device) * (i + 1)
            size = torch.rand(x.shape[:3], generator=make).to(device)[..., None]
            values, own = quantized(x.nan_to_num(0.0) * size, kv_format, head_scale)
            made.append(values)
            exact.append((values.double() - kv_format.offset) * own[..., None])
            scales.append(own.float() if kv_format.scales == "token" else head_scale)
            if kv_format.scales == "token":
                # Values that no row uses may hold anything finite; their scales may
                # hold NaN too.
                scales[-1][x.isnan().any(-1)] = float("nan")
        # Strided as the engine's: the middle one of three layers.
        self.kv = KVLayer(*(in_layers(x) for x in made), *(
            in_layers(x) if kv_format.scales == "token" else x for x in scales
        ))  # fmt: skip
        self.exact = exact

    def check(self, tuning: AttentionTuning = SMALL, **keywords: object) -> Tensor:
        out = self.run(tuning, **keywords)
        starts, lens = self.query_start.tolist(), self.seq_lens.tolist()[: self.rows]
        want = twin(
            self.q, self.exact[0], self.exact[1], starts, lens, self.table, 0.3,
            **keywords,  # type: ignore[arg-type]
        )[: self.real]  # fmt: skip
        torch.testing.assert_close(out.double(), want, atol=self.allowed, rtol=self.allowed)
        self.check_reference(want, **keywords)
        return out

    def check_reference(self, want: Tensor, **keywords: object) -> None:
        q_lens = tuple(self.query_start.diff().tolist())
        # The twin may read values that were never written, so these have to be finite.
        scales = [scale.nan_to_num(1.0) for scale in (self.kv.k_scale, self.kv.v_scale)]
        if self.kv.format.scales == "token":
            scales = [in_layers(scale) for scale in scales]
        found = reference.paged_attention(
            self.q, KVLayer(self.kv.k, self.kv.v, *scales), self.query_start, self.seq_lens,
            self.table, q_lens=q_lens,
            max_q_len=self.max_q, max_seq_len=self.max_seq, scale=0.3,
            scratch=None, **keywords,  # type: ignore[arg-type]
        )[: self.real]  # fmt: skip
        torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)


def in_layers(x: Tensor) -> Tensor:
    """The same values as a view of a tensor with three layers' K and V in each block."""
    store = torch.zeros((x.shape[0], 3, 2, *x.shape[1:]), dtype=torch.float32, device=x.device)
    store = store.to(x.dtype)
    view = store[:, 1, 0]
    view.copy_(x)
    return view


@formats
@pytest.mark.parametrize(("heads", "kv_heads"), [slow(4, 4), (6, 1), slow(16, 8)])
def test_mixed_batch(kernel_device: str, kv_format: KVFormat, heads: int, kv_heads: int) -> None:
    Stored(kv_format, kernel_device, MIXED, heads, kv_heads).check()


@formats
@pytest.mark.parametrize("dim", [slow(16), 80, slow(128), 256])
def test_head_sizes(kernel_device: str, kv_format: KVFormat, dim: int) -> None:
    Stored(kv_format, kernel_device, [(1, 33), (20, 45)], 2, 1, dim).check()


@formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kernel_device: str, kv_format: KVFormat, dtype: torch.dtype) -> None:
    case = Stored(kv_format, kernel_device, [(1, 70), (20, 45)], dtype=dtype)
    out = case.run()
    starts, lens = case.query_start.tolist(), case.seq_lens.tolist()
    want = twin(case.q, case.exact[0], case.exact[1], starts, lens, case.table, 0.3)
    tolerance = 1.6e-2 if dtype is torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@both_scales
@pytest.mark.parametrize("block_size", [1, slow(32)])
def test_block_sizes(kernel_device: str, kv_format: KVFormat, block_size: int) -> None:
    Stored(kv_format, kernel_device, [(1, 70), (20, 45)], block_size=block_size).check()


@both_scales
@pytest.mark.parametrize("window", [slow(1), 16, slow(33)])
def test_sliding_window(kernel_device: str, kv_format: KVFormat, window: int) -> None:
    Stored(kv_format, kernel_device, MIXED).check(window=window)


@pytest.mark.parametrize(
    "kv_format", [slow(FORMATS["fp8"]), slow(FORMATS["fp8_dynamic"]), FORMATS["int8"]], ids=FORMATS
)
def test_soft_cap(kernel_device: str, kv_format: KVFormat) -> None:
    Stored(kv_format, kernel_device, MIXED).check(softcap=2.0)


@both_scales
@pytest.mark.parametrize("window", [slow(None), 33])
def test_long_rows_in_parts(kernel_device: str, kv_format: KVFormat, window: int | None) -> None:
    rows = [(20, 300), (1, 77), (16, 32)]
    Stored(kv_format, kernel_device, rows, 6, 1, 80).check(
        replace(SMALL, spread=100), window=window
    )


@both_scales
def test_decode_in_parts(kernel_device: str, kv_format: KVFormat) -> None:
    rows = [(1, 1), (1, 300), (1, 16), (1, 129)]
    for programs in (2, 80):
        Stored(kv_format, kernel_device, rows).check(replace(SMALL, programs=programs))


@both_scales
def test_default_and_fixed_tuning(kernel_device: str, kv_format: KVFormat) -> None:
    case = Stored(kv_format, kernel_device, MIXED, 4, 1, 128)
    case.check(AttentionTuning())
    together = case.check(replace(SMALL, fixed=True))
    alone = Stored.__new__(Stored)
    alone.__dict__ |= case.__dict__
    start, end = int(case.query_start[4]), int(case.query_start[5])
    out = paged_attention(
        case.q[end - 1 : end], case.kv,
        torch.tensor([0, 1], dtype=torch.int32, device=kernel_device),
        case.seq_lens[4:5], case.table[4:5],
        max_q_len=1, max_seq_len=case.max_seq, scale=0.3, tuning=replace(SMALL, fixed=True),
    )  # fmt: skip
    assert end - start == MIXED[4][0]
    assert torch.equal(out, together[end - 1 : end])


@both_scales
def test_drafts_are_short_rows(kernel_device: str, kv_format: KVFormat) -> None:
    Stored(kv_format, kernel_device, [(4, 60), (4, 5), (1, 90)], 6, 1).check(
        replace(SMALL, decode=Tiles(32, 16, 2, 2))
    )


def test_queries_beyond_fp16(kernel_device: str) -> None:
    """bf16 queries may exceed the range of fp16, and very small keys keep their precision."""
    case = Stored(FORMATS["int8"], kernel_device, [(1, 40)], dtype=torch.bfloat16)
    case.q.fill_(1e30)
    assert case.run().isfinite().all()


# -- what is stored --------------------------------------------------------------------------------


class Store:
    """A cache of three layers in 8 bits, and tokens for the middle layer."""

    def __init__(self, kv_format: KVFormat, device: str, dtype: torch.dtype, dim: int) -> None:
        make = torch.Generator().manual_seed(dim)
        self.kv_format, self.heads, self.dim, self.size = kv_format, 3, dim, 4
        shape = 5, 3, 2, self.heads, self.size
        self.values = torch.zeros((*shape, dim), dtype=kv_format.dtype, device=device)
        self.scales = torch.full(shape, 9.0, device=device)
        self.fixed = torch.tensor([0.01, 0.02, 0.5], device=device)
        qkv = torch.randn(5, 4 + 2 * self.heads, dim, generator=make)
        qkv[2, 4] = 0.0
        qkv[3, 5:] *= 1e4
        qkv[1, 7:] *= 1e-3
        self.qkv = qkv.to(dtype).to(device)
        self.slots = torch.tensor([7, 0, 16, 6, -1], dtype=torch.int32, device=device)
        self.positions = torch.tensor([3, 0, 11, 2, 0], dtype=torch.int32, device=device)
        angles = torch.rand(12, dim // 4, generator=make) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
        self.weight = (torch.rand(dim, generator=make) + 0.5).to(dtype).to(device)

    def layer(self) -> KVLayer:
        own = self.scales[:, 1, 0], self.scales[:, 1, 1]
        if self.kv_format.scales == "head":
            own = self.fixed, 2 * self.fixed
        return KVLayer(self.values[:, 1, 0], self.values[:, 1, 1], *own)

    def arguments(self, normed: bool) -> dict[str, object]:
        return {
            "positions": self.positions, "slots": self.slots, "cos_sin": self.cos_sin,
            "q_weight": self.weight if normed else None,
            "k_weight": self.weight if normed else None, "eps": 1e-6, "scratch": None,
            "interleaved": normed,
        }  # fmt: skip

    def wanted(self, normed: bool) -> tuple[Tensor, Tensor]:
        """Returns k and v before they are stored, float64 [tokens, heads, dim]."""
        wide = torch.zeros(5, 2, self.heads, self.size, self.dim, dtype=torch.float64)
        arguments = {
            name: value.cpu().double() if isinstance(value, Tensor) and value.is_floating_point()
            else value.cpu() if isinstance(value, Tensor) else value
            for name, value in self.arguments(normed).items()
        }  # fmt: skip
        reference.qk_norm_rope_store(
            self.qkv.cpu().double(),
            KVLayer(wide[:, 0], wide[:, 1]),
            **arguments,  # type: ignore[arg-type]
        )
        slots = self.slots[:4].long().cpu()
        picked = wide[slots // self.size, :, :, slots % self.size]
        return picked[:, 0], picked[:, 1]


STORES = {"kernel": qk_norm_rope_store, "reference": reference.qk_norm_rope_store}


@formats
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "normed"), [(64, False), (80, True)])
def test_stored_values_and_scales_are_close_to_the_keys_and_values(
    kernel_device: str,
    kv_format: KVFormat,
    store: object,
    dtype: torch.dtype,
    dim: int,
    normed: bool,
) -> None:
    case = Store(kv_format, kernel_device, dtype, dim)
    before = case.values.clone(), case.scales.clone()
    layer = case.layer()
    store(case.qkv, layer, **case.arguments(normed))  # type: ignore[operator]
    # Rotation in bf16 has a rounding error relative to the size of the rotated pair.
    close = 1e-5 if dtype is torch.float32 else 2e-2
    slots = case.slots[:4].long()
    at = slots // case.size, slice(None), slots % case.size
    for kind, want in enumerate(case.wanted(normed)):
        cache = (layer.k, layer.v)[kind]
        scale = (layer.k_scale, layer.v_scale)[kind]
        assert scale is not None
        own = scale[at] if kv_format.scales == "token" else scale.expand(4, -1)
        found = (cache[at].double().cpu() - kv_format.offset) * own.double().cpu()[..., None]
        if kv_format.scales == "token":
            top = want.abs().amax(-1)
            torch.testing.assert_close(
                own.double().cpu() * kv_format.largest, top, atol=1e-12, rtol=close
            )
        reach = own.double().cpu()[..., None] * kv_format.largest
        allowed = rounding(kv_format, want, own) + close * want.abs().amax(-1, keepdim=True)
        assert ((found - want.clamp(-reach, reach)).abs() <= allowed + 1e-12).all()
    # Nothing else was touched.
    for tensor, was in zip((case.values, case.scales), before, strict=True):
        tensor[:, 1].transpose(2, 3)[slots // case.size, :, slots % case.size] = 0
        was[:, 1].transpose(2, 3)[slots // case.size, :, slots % case.size] = 0
        assert torch.equal(tensor.float(), was.float())


def rounding(kv_format: KVFormat, x: Tensor, scale: Tensor) -> Tensor:
    """Returns the largest error of storing x, [T, heads, dim]."""
    scale = scale.double().cpu()[..., None]
    if kv_format.offset:
        return 0.5001 * scale.expand(x.shape)
    return torch.maximum(x.abs() * (2**-4 + 1e-6), 2**-10 * scale * 1.001)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint8])
def test_bytes_are_rounded_as_pytorch_does(kernel_device: str, kind: torch.dtype) -> None:
    """Rounds ties to even, small numbers and large ones; every byte's value rounds to the same
    byte."""
    kv_format = KVFormat(kind, "head")
    every = torch.arange(256, dtype=torch.uint8)
    exact = every.view(kind).float() - kv_format.offset
    exact = exact[exact.isfinite() & (exact.abs() <= kv_format.largest)]
    order = exact.sort().values
    between = (order[1:] + order[:-1]) / 2
    x = torch.cat((exact, between, between * 1.0001, between * 0.9999, exact * 7, exact * 1e-3))
    x = x[: len(x) // 16 * 16].reshape(-1, 16).to(kernel_device)
    count = len(x)
    cache = torch.zeros(count, 2, 1, 1, 16, dtype=kind, device=kernel_device)
    one = torch.ones(1, device=kernel_device)
    qkv = torch.stack((x, x, x), 1)
    slots = torch.arange(count, dtype=torch.int32, device=kernel_device)
    qk_norm_rope_store(
        qkv, KVLayer(cache[:, 0], cache[:, 1], one, one), positions=slots, slots=slots
    )
    want = x.clamp(-kv_format.largest, kv_format.largest)
    want = (want.round() + kv_format.offset if kv_format.offset else want).to(kind)
    for stored in (cache[:, 0], cache[:, 1]):
        # Compared by value, because there are two zeros.
        assert torch.equal(stored[:, 0, 0].float(), want.float())
