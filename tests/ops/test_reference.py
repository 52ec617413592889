"""The reference ops against their definitions, written out plainly in float64."""

from __future__ import annotations

import inspect
import math
import random
import sys
import types

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import ConfigError
from quire.ops import choose
from quire.ops.reference import attention as reference_attention
from quire.ops.reference import cache as reference_cache

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*s, dtype=dtype) for s in ((5, 24), (24,), (24,)))
    wide = x.double()
    rms = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(ops.rms_norm(x, weight, 1e-5), rms)
    assert_close(ops.rms_norm(x, weight, 1e-5, bias.expand(5, 24)), rms + bias.double())
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), centred / deviation * weight + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    x = randn(5, 24, dtype=dtype)
    wide = x.double()
    gate, up = wide.chunk(2, dim=-1)
    assert_close(ops.activate(x, "silu_and_mul"), gate / (1 + (-gate).exp()) * up)
    assert_close(ops.activate(x, "gelu"), wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2))))
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    tanh = wide * 0.5 * (1 + inner.tanh())
    assert_close(ops.activate(x, "gelu_tanh"), tanh)
    assert_close(ops.activate(x, "gelu_tanh_and_mul"), tanh[:, :12] * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_linear(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias, residual = (
        randn(*s, dtype=dtype) for s in ((rows, 24), (40, 24), (40,), (rows, 40))
    )
    kept = residual.clone()
    product = x.double() @ weight.double().t()
    plain = ops.Weight.plain(weight)
    assert_close(ops.linear(x, plain), product)
    assert_close(ops.linear(x, plain, bias), product + bias.double())
    assert_close(ops.linear(x, plain, bias, residual), product + bias.double() + residual.double())
    strided = randn(rows, 48, dtype=dtype)[:, ::2]
    assert_close(ops.linear(strided, plain), strided.double() @ weight.double().t())
    assert torch.equal(residual, kept)


def test_embedding() -> None:
    table = randn(10, 4)
    ids = torch.tensor([3, -1, 9, 10, 0], dtype=torch.int32)
    found = ops.embedding(ids, table)
    assert torch.equal(found[[0, 2, 4]], table[[3, 9, 0]])
    assert not found[[1, 3]].any()
    shard = ops.embedding(ids, table[3:6], 3)
    assert torch.equal(shard[0], table[3])
    assert not shard[1:].any()


def paged(blocks: int, heads: int, size: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns a cache of three layers, and views of the k and v of its middle layer."""
    cache = randn(blocks, 3, 2, heads, size, dim, dtype=dtype)
    return cache, cache[:, 1, 0], cache[:, 1, 1]


@pytest.fixture(params=["cpu", "device"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also takes the path of devices whose tensors the host must not read."""
    if request.param == "device":
        for module in (reference_attention, reference_cache):
            monkeypatch.setattr(module, "host_reads", lambda tensor: False)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "rotary"), [(False, 8), (True, 8), (True, 4), (False, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope_store(
    dtype: torch.dtype, normed: bool, rotary: int, interleaved: bool
) -> None:
    heads, kv_heads, dim, size = 6, 2, 8, 4
    cache, k_cache, v_cache = paged(5, kv_heads, size, dim, dtype)
    before = cache.clone()
    qkv = randn(4, heads + 2 * kv_heads, dim, dtype=dtype)
    given = qkv.clone()
    slots = torch.tensor([7, -1, 16, 6], dtype=torch.int32)
    positions = torch.tensor([3, 0, 11, 2], dtype=torch.int32)
    weights = randn(2, dim, dtype=dtype) if normed else (None, None)
    angles = torch.arange(12).unsqueeze(1) * randn(1, max(rotary, 2) // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    if dtype is not torch.float64:
        table = table.float()
    q = ops.qk_norm_rope_store(
        qkv,
        ops.KVLayer(k_cache, v_cache),
        positions=positions,
        slots=slots,
        cos_sin=table if rotary else None,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-6,
        interleaved=interleaved,
    )
    expected_q, expected_k, v = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        expected_q = ops.rms_norm(expected_q, weights[0].double(), 1e-6)
        expected_k = ops.rms_norm(expected_k, weights[1].double(), 1e-6)
    if rotary:
        expected_q = turned(expected_q, angles[positions.long()], interleaved)
        expected_k = turned(expected_k, angles[positions.long()], interleaved)
    assert_close(q, expected_q)
    assert torch.equal(qkv, given)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, size)
            assert_close(k_cache[block, :, offset], expected_k[token])
            assert_close(v_cache[block, :, offset], v[token])
            k_cache[block, :, offset] = before[block, 1, 0, :, offset]
            v_cache[block, :, offset] = before[block, 1, 1, :, offset]
    assert torch.equal(cache, before)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs (i, i + rotary / 2), or (2 i, 2 i + 1), as complex numbers."""
    half = angles.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    step = rotary[..., ::2], rotary[..., 1::2]
    numbers = torch.complex(*(step if interleaved else rotary.chunk(2, dim=-1)))
    numbers = numbers * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    parts = numbers.real, numbers.imag
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((both, rest), dim=-1)


@pytest.mark.usefixtures("host")
def test_a_batch_of_padding_stores_nothing() -> None:
    cache, k_cache, v_cache = paged(3, 2, 4, 8, torch.float32)
    before = cache.clone()
    none = torch.full((2,), -1, dtype=torch.int32)
    qkv = randn(2, 6, 8, dtype=torch.float32)
    ops.qk_norm_rope_store(qkv, ops.KVLayer(k_cache, v_cache), positions=none, slots=none)
    assert torch.equal(cache, before)


LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 64), (1, 5)],
    "prompts": [(9, 9), (30, 30)],
    "mixed": [(1, 40), (7, 20), (1, 3), (4, 4), (1, 41), (5, 33), (5, 8), (0, 6), (25, 60)],
    "long": [(300, 520), (1, 500)],
    "nothing": [],
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 3.0), (19, 3.0)])
def test_paged_attention(
    dtype: torch.dtype, rows: str, window: int | None, softcap: float | None
) -> None:
    heads, kv_heads, dim, size = 6, 2, 8, 4
    lengths = LENGTHS[rows]
    _, k_cache, v_cache = paged(400, kv_heads, size, dim, dtype)
    order = list(range(1, 400))
    random.Random(0).shuffle(order)
    tables = []
    for q_len, length in lengths:
        table = [order.pop() for _ in range(-(-length // size))]
        if window is not None:
            for old in range(max(0, length - q_len - window + 1) // size):
                table[old] = -1
        tables.append(table)
    width = max([len(table) for table in tables], default=0) + 2
    q_lens = tuple(q_len for q_len, _ in lengths)
    q = randn(sum(q_lens) + 2, heads, dim, dtype=dtype)
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    found = ops.paged_attention(
        q,
        ops.KVLayer(k_cache, v_cache),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for _, length in lengths], dtype=torch.int32),
        torch.tensor(
            [table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32
        ).view(len(tables), width),
        q_lens=q_lens,
        max_q_len=max(q_lens, default=0),
        max_seq_len=600,
        scale=0.3,
        window=window,
        softcap=softcap,
    )
    for (q_len, length), table, start in zip(lengths, tables, starts, strict=False):
        expected = plain_attention(
            q[start : start + q_len].double(),
            [k_cache[p, :, o].double() for p, o in slots_of(table, length, size)],
            [v_cache[p, :, o].double() for p, o in slots_of(table, length, size)],
            window,
            softcap,
        )
        assert_close(found[start : start + q_len], expected)
    assert not found[sum(q_lens) :].any()


def slots_of(table: list[int], length: int, size: int) -> list[tuple[int, int]]:
    return [(table[position // size], position % size) for position in range(length)]


def plain_attention(
    q: Tensor, k: list[Tensor], v: list[Tensor], window: int | None, softcap: float | None
) -> Tensor:
    if not len(q):
        return q
    share = q.shape[1] // k[0].shape[0]
    keys = torch.stack(k).repeat_interleave(share, dim=1)
    values = torch.stack(v).repeat_interleave(share, dim=1)
    out = []
    for index, query in enumerate(q):
        last = len(k) - len(q) + index
        first = 0 if window is None else max(0, last - window + 1)
        scores = torch.einsum("hd,thd->ht", query, keys[first : last + 1]) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[first : last + 1]))
    return torch.stack(out)


def test_policy_is_scoped_and_checked() -> None:
    with pytest.raises(ConfigError, match="unknown kernel backend 'magic'"):
        ops.Policy(backend="magic")
    policy = ops.Policy(backend="reference")
    with ops.use_policy(policy):
        assert ops.current_policy() is policy


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """Returns x * by."""
    return x * by


def test_an_op_has_its_twins_signature_and_runs_the_kernel_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = ops.op(scaled)
    assert (op.__name__, op.__doc__) == ("scaled", scaled.__doc__)
    assert inspect.signature(op) == inspect.signature(scaled)
    x = torch.ones(2, dtype=torch.float64)
    assert_close(op(x, by=3.0), 3 * x)

    module = types.ModuleType("kernels")
    module.scaled = lambda x, by=2.0: -x * by
    monkeypatch.setitem(sys.modules, "kernels", module)
    backend = choose.Backend("kernels", "kernels", frozenset({"cpu"}))
    monkeypatch.setattr(choose, "BACKENDS", (backend,))
    # The test has its own policy, because an op remembers its choice for each policy.
    with ops.use_policy(ops.Policy()):
        assert_close(op(x, 3.0), -3 * x)
        assert_close(ops.activate(x, "gelu"), ops.activate(x, "gelu"))
    with ops.use_policy(ops.Policy(backend="reference")):
        assert_close(op(x), 2 * x)
