"""The router, and the order of tokens by expert."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.choose import current_policy
from quire.ops.experts import ExpertCopies, Routed, Routing
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.common import load_k, norm_weight, normalise, wait_for_predecessor
from quire.ops.triton.products.small import default_workspace


@triton.jit
def _allowed(
    choice, es, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GP: tl.constexpr, BM: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Returns `choice` [BM, EP] with -inf outside of the chosen groups.

    The chosen groups have the largest sums of their two best scores."""
    gs = tl.arange(0, GP)[None, :]
    sums = tl.full([BM, GP], float("-inf"), tl.float32)
    for g in range(GROUPS):
        own = tl.where(es // GROUP_SIZE == g, choice, float("-inf"))
        best = tl.max(own, 1)
        place = tl.min(tl.where(own == best[:, None], es, EP), 1)
        second = tl.max(tl.where(es == place[:, None], float("-inf"), own), 1)
        total = best + (second if GROUP_SIZE > 1 else 0.0)
        sums = tl.where(gs == g, total[:, None], sums)
    kept = tl.full([BM, EP], float("-inf"), tl.float32)
    for _ in range(TOP_GROUPS):
        best = tl.max(sums, 1)
        group = tl.min(tl.where(sums == best[:, None], gs, GP), 1)
        sums = tl.where(gs == group[:, None], float("-inf"), sums)
        kept = tl.where(es // GROUP_SIZE == group[:, None], choice, kept)
    return kept


@triton.jit
def _keys(choice, es, EP: tl.constexpr):
    """Returns int64 keys that sort as `choice` does. If scores are equal, the lower index wins."""
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (ordered << 32) | (EP - 1 - es).to(tl.int64)


@triton.jit
def _scores(logits, ms, correction_ptr, E, BM: tl.constexpr, EP: tl.constexpr,
            SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr,
            TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GP: tl.constexpr):  # fmt: skip
    """Returns the scores [BM, EP] of experts, and the keys by which experts are chosen."""
    es = tl.arange(0, EP)[None, :]
    known = es < E
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.where(known, logits, float("-inf")), 1)
        scores = tl.where(known, tl.exp(logits - top[:, None]), 0.0)
        scores = scores / tl.sum(scores, 1)[:, None]
    choice = scores
    if CORRECTED:
        choice += tl.load(correction_ptr + es, mask=known, other=0.0)
    # A NaN gets a low score, because otherwise it would hide the other experts.
    choice = tl.where(choice == choice, choice, -3.0e38)
    choice = tl.where(known, choice, float("-inf"))
    if GROUPS > 1:
        choice = _allowed(choice, es, GROUPS, TOP_GROUPS, GROUP_SIZE, GP, BM, EP)
    return scores, _keys(choice, es, EP)


@triton.jit
def _store_choice(
    ids, weights, at, ms, mask, ids_ptr, weights_ptr, live, scale, first, count, counts_ptr,
    slots_ptr, loads_ptr, stride_se, COPIES: tl.constexpr,
):  # fmt: skip
    """Stores experts and their weights at places `at`. Experts of other ranks are stored as -1."""
    if COPIES:
        copy = ms % tl.load(counts_ptr + ids, mask=mask, other=1)
        local = tl.load(slots_ptr + ids * stride_se + copy, mask=mask, other=-1)
        own = (local >= 0) & (ms < live)
        tl.atomic_add(loads_ptr + ids, 1, mask=mask & (ms < live), sem="relaxed")
    else:
        local = ids - first
        own = (local >= 0) & (local < count) & (ms < live)
    tl.store(ids_ptr + at, tl.where(own, local, -1), mask=mask)
    tl.store(weights_ptr + at, tl.where(own, weights * scale, 0.0), mask=mask)


@triton.jit
def _choose_all(
    scores, keys, m, ids_ptr, weights_ptr, live, scale, first, count, counts_ptr, slots_ptr,
    loads_ptr, stride_se, EP: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Stores the experts of one token, [1, EP].

    An expert's place is the number of experts with larger keys. All places are counted at once. A
    search for one expert after the other would wait for each."""
    keys = tl.reshape(keys, [EP])
    weights = tl.reshape(scores, [EP])
    place = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    chosen = place < TOP_K
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(chosen, weights, 0.0), 0) + 1e-20)
    es = tl.arange(0, EP)
    ms = tl.zeros([EP], tl.int32) + m
    _store_choice(
        es, weights, ms * TOP_K + place, ms, chosen, ids_ptr, weights_ptr, live, scale,
        first, count, counts_ptr, slots_ptr, loads_ptr, stride_se, COPIES,
    )  # fmt: skip


@triton.jit
def _choose(
    scores, keys, ms, ids_ptr, weights_ptr, T, live, scale, first, count, counts_ptr, slots_ptr,
    loads_ptr, stride_se, BM: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr,
    KP: tl.constexpr, RENORMALIZE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Stores the experts of tokens `ms` [BM], one after the other."""
    es = tl.arange(0, EP)[None, :]
    ks = tl.arange(0, KP)[None, :]
    ids = tl.zeros([BM, KP], tl.int32)
    weights = tl.zeros([BM, KP], tl.float32)
    for k in range(TOP_K):
        place = EP - 1 - (tl.max(keys, 1) & 0x7FFFFFFF).to(tl.int32)
        here = es == place[:, None]
        weight = tl.sum(tl.where(here, scores, 0.0), 1)
        keys = tl.where(here, -0x8000000000000000, keys)
        ids = tl.where(ks == k, place[:, None], ids)
        weights = tl.where(ks == k, weight[:, None], weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    mask = (ms < T)[:, None] & (ks < TOP_K)
    _store_choice(
        ids, weights, ms[:, None] * TOP_K + ks, ms[:, None], mask, ids_ptr, weights_ptr, live,
        scale, first, count, counts_ptr, slots_ptr, loads_ptr, stride_se, COPIES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "first", "count"])
def route_kernel(
    x_ptr, g_ptr, w_ptr, bias_ptr, correction_ptr, live_ptr, normed_ptr, logits_ptr, counters_ptr,
    ids_ptr, weights_ptr, T, K, E, stride_xm, stride_wn, eps, scale, first, count,
    counts_ptr, slots_ptr, loads_ptr, stride_se,
    BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, SQUARED: tl.constexpr,
    SPLITS: tl.constexpr, EP: tl.constexpr, EVEN_K: tl.constexpr, TOP_K: tl.constexpr,
    KP: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GP: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, CORRECTED: tl.constexpr,
    COPIES: tl.constexpr, DOT: tl.constexpr, COUNTED: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes logits [T, E] of norm(x) [T, K]. The last program of a tile of tokens chooses the
    experts.

    Grid: tiles of experts, tiles of tokens, parts of the inputs. The sums of parts are added in
    order.

    Args:
        DOT: use tensor cores. Otherwise a tile is one token and BK >= K.
        SQUARED: number of tiles of inputs that are loaded at once to sum their squares.
        COUNTED: see `_choose_all`.
    """
    pid_e, pid_m, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ms = pid_m * BM + tl.arange(0, BM)
    es = pid_e * BE + tl.arange(0, BE)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w_ptrs = w_ptr + tl.minimum(es, E - 1).to(tl.int64)[:, None] * stride_wn
    x_ptrs = x_ptr + tl.minimum(ms, T - 1).to(tl.int64)[:, None] * stride_xm
    normed_ptrs = normed_ptr + ms.to(tl.int64)[:, None] * K
    mask_m = (ms < T)[:, None]
    ks = tl.arange(0, BK)[None, :]
    if not DOT:
        w = load_k(w_ptrs + ks, ks, K, EVEN_K)
        if HAS_NORM:
            g = norm_weight(g_ptr, ks, K, EVEN_K)
    if PDL:
        wait_for_predecessor(False)
    if not DOT:
        x = load_k(x_ptrs + ks, ks, K, EVEN_K)
        if HAS_NORM:
            wide = x.to(tl.float32)
            rms = tl.rsqrt(tl.sum(wide * wide, 1) / K + eps)
            x = normalise(wide, rms[:, None], g, dtype, g_ptr.dtype.element_ty).to(dtype)
            if pid_e == 0:
                tl.store(normed_ptrs + ks, x, mask=mask_m & (ks < K))
        logits = tl.sum(w.to(tl.float32) * x.to(tl.float32), 1)[None, :]
    else:
        rms = tl.full([BM], 1.0, tl.float32)
        if HAS_NORM:
            # Loads are batched, because waiting for each would take longer than the product.
            squares = tl.zeros([BM, BK], tl.float32)
            for start in range(0, K, BK * SQUARED):
                for index in tl.static_range(SQUARED):
                    k = start + index * BK + ks
                    own = load_k(x_ptrs + k, k, K, False).to(tl.float32)
                    squares += own * own
            rms = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        logits = tl.zeros([BM, BE], tl.float32)
        width = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
        for k0 in range(part * width, tl.minimum(K, (part + 1) * width), BK):
            k = k0 + ks
            x = load_k(x_ptrs + k, k, K, EVEN_K)
            if HAS_NORM:
                g = norm_weight(g_ptr, k, K, EVEN_K)
                x = normalise(x.to(tl.float32), rms[:, None], g, dtype, g_ptr.dtype.element_ty)
                x = x.to(dtype)
                if pid_e == 0:
                    tl.store(normed_ptrs + k, x, mask=mask_m & (k < K))
            w = load_k(w_ptrs + k, k, K, EVEN_K)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            logits = tl.dot(x, tl.trans(w), logits, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + es, mask=es < E, other=0.0).to(tl.float32)[None, :]
        logits += tl.where(part == 0, bias, 0.0)
    m64 = ms.to(tl.int64)[:, None]
    mask = mask_m & (es < E)[None, :]
    tl.store(logits_ptr + (part * T + m64) * E + es[None, :], logits, mask=mask)
    tl.debug_barrier()  # Every thread's part is written before the one atomic that signals it.
    programs = tl.num_programs(0) * tl.num_programs(2)
    last = tl.atomic_add(counters_ptr + pid_m, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counters_ptr + pid_m, 0)
        every = tl.arange(0, EP)[None, :]
        wanted = mask_m & (every < E)
        full = tl.zeros([BM, EP], tl.float32)
        for index in tl.static_range(SPLITS):
            at = logits_ptr + (index * T + m64) * E + every
            full += tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
        scores, keys = _scores(
            full, ms, correction_ptr, E, BM, EP, SIGMOID, CORRECTED, GROUPS, TOP_GROUPS,
            GROUP_SIZE, GP,
        )  # fmt: skip
        live = tl.load(live_ptr)
        if COUNTED:
            _choose_all(
                scores, keys, pid_m, ids_ptr, weights_ptr, live, scale, first, count,
                counts_ptr, slots_ptr, loads_ptr, stride_se, EP, TOP_K, RENORMALIZE, COPIES,
            )  # fmt: skip
        else:
            _choose(
                scores, keys, ms, ids_ptr, weights_ptr, T, live, scale, first, count, counts_ptr,
                slots_ptr, loads_ptr, stride_se, BM, EP, TOP_K, KP, RENORMALIZE, COPIES,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Tiles of tokens, experts and inputs.

    Attributes:
        bm: tokens.
        be: experts.
        bk: inputs.
        warps: warps of a program.
        stages: tiles in flight.
        dot: use tensor cores. Otherwise a tile is one token with all its inputs.
        splits: number of parts of the inputs.
        squared: number of tiles of inputs that are loaded at once to sum their squares.
        counted: all experts of a token are chosen at once, see `_choose_all`.
    """

    bm: int
    be: int
    bk: int
    warps: int
    stages: int = 1
    dot: bool = True
    splits: int = 1
    squared: int = 1
    counted: bool = False


_MOST_GEMV_TOKENS = 16
_MOST_INPUTS = 8192
_MOST_COUNTED = 128
"""Up to this many experts, each is compared with all others to choose a token's experts."""


@functools.cache
def route_plan(
    tokens: int, hidden: int, experts: int, deterministic: bool, size: int = 2
) -> RoutePlan:
    """Returns the tiles for a number of tokens; an input has `size` bytes."""
    whole = triton.next_power_of_2(hidden)
    if tokens <= _MOST_GEMV_TOKENS and whole <= _MOST_INPUTS and not deterministic:
        tile = 4 if whole <= 4096 else 2
        return RoutePlan(1, tile, whole, 4, dot=False, counted=experts <= _MOST_COUNTED)
    # With few tokens, many tiles of experts and parts of the inputs are needed to fill the card.
    if deterministic:
        be, splits = 32, 2
    elif tokens <= 128:
        be, splits = 32, 8
    else:
        be, splits = 128, 4 if tokens <= 512 else 2
    be = min(be, 256 // size, max(16, triton.next_power_of_2(experts)))
    return RoutePlan(16, be, 128, 8, 3, splits=splits, squared=8)


def route(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    live: Tensor,
    norm: RmsScale | None = None,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
    copies: ExpertCopies | None = None,
    ids: Tensor | None = None,
    plan: RoutePlan | None = None,
) -> Routed:
    """See `reference.experts.route`. By default `plan` follows from the shape."""
    tokens, hidden = x.shape
    experts, top_k = len(weight), routing.top_k
    if ids is None:
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    normed = x if norm is None else torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return Routed(normed, ids, weights)
    if plan is None:
        fixed = current_policy().deterministic
        plan = route_plan(tokens, hidden, experts, fixed, x.element_size())
    logits = torch.empty(plan.splits, tokens, experts, dtype=torch.float32, device=x.device)
    card = traits(x.device)
    given = ExpertCopies(live, live, live) if copies is None else copies
    grid = triton.cdiv(experts, plan.be), triton.cdiv(tokens, plan.bm), plan.splits
    launch(route_kernel, grid)(
        x, x if norm is None else norm.weight, weight, weight if bias is None else bias,
        weight if correction is None else correction, live, normed, logits,
        default_workspace(x.device).counters, ids, weights, tokens, hidden, experts, x.stride(0),
        weight.stride(0), 0.0 if norm is None else norm.eps, routing.scale, first,
        experts - first if count is None else count, given.counts, given.slots, given.loads,
        given.slots.stride(0),
        BM=plan.bm, BE=plan.be, BK=plan.bk, SQUARED=plan.squared, SPLITS=plan.splits,
        EP=max(triton.next_power_of_2(experts), 2), EVEN_K=hidden % plan.bk == 0, TOP_K=top_k,
        KP=triton.next_power_of_2(top_k),
        SIGMOID=routing.score == "sigmoid", RENORMALIZE=routing.renormalize,
        GROUPS=routing.groups, TOP_GROUPS=routing.top_groups,
        GROUP_SIZE=experts // routing.groups, GP=triton.next_power_of_2(routing.groups),
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, CORRECTED=correction is not None,
        COPIES=copies is not None, DOT=plan.dot, COUNTED=plan.counted, PDL=card.pdl,
        UPCAST=x.dtype == torch.bfloat16 and not card.bf16,
        **options(card.pdl, num_warps=plan.warps, num_stages=plan.stages),
    )  # fmt: skip
    return Routed(normed, ids, weights)


@triton.jit(do_not_specialize=["A", "MB"])
def sort_kernel(
    ids_ptr, order_ptr, blocks_ptr, A, E, MB,
    BM: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sorts assignments by expert, and cuts the assignments of each expert into blocks of BM.

    Grid: one program for each expert. Each program counts all assignments and places those of its
    expert, so the order does not depend on timing."""
    if PDL:
        wait_for_predecessor(False)
    e = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    bins = tl.arange(0, 2 * EP)
    counts = tl.zeros([2 * EP], tl.int32)
    for a in range(0, A, CHUNK):
        ids = tl.load(ids_ptr + a + at, mask=a + at < A, other=-1)
        counts += tl.histogram(tl.where(ids < 0, EP, ids), 2 * EP)
    counts = tl.where(bins < E, counts, 0)
    start = tl.sum(tl.where(bins < e, counts, 0), 0)
    own = tl.sum(tl.where(bins == e, counts, 0), 0)
    tiles = (counts + BM - 1) // BM
    block = tl.sum(tl.where(bins < e, tiles, 0), 0)
    seen = start
    for a in range(0, A, CHUNK):
        ids = tl.load(ids_ptr + a + at, mask=a + at < A, other=-1)
        hit = (ids == e).to(tl.int32)
        places = seen + tl.cumsum(hit, 0) - 1
        tl.store(order_ptr + places, a + at, mask=hit != 0)
        seen += tl.sum(hit, 0)
    for i in range(0, (own + BM - 1) // BM, 32):
        place = i + tl.arange(0, 32)
        mask = place * BM < own
        tl.store(blocks_ptr + block + place, tl.zeros([32], tl.int32) + e, mask=mask)
        tl.store(blocks_ptr + MB + block + place, start + place * BM, mask=mask)
        tl.store(
            blocks_ptr + 2 * MB + block + place, tl.zeros([32], tl.int32) + start + own, mask=mask
        )
    if e == 0:
        tl.store(blocks_ptr + 3 * MB, tl.sum(tiles, 0))


@dataclass(frozen=True, slots=True)
class Sorted:
    """Assignments of tokens to experts, in the order of experts.

    Attributes:
        order: int32 [A], the index of each assignment in ids [T * k].
        blocks: int32 [3 * most + 1]: the expert of each block, then the first place of each block,
            then the end of the places of its expert. The last entry is the number of blocks.
        most: the most blocks.
    """

    order: Tensor
    blocks: Tensor
    most: int


def sort_by_expert(ids: Tensor, experts: int, bm: int) -> Sorted:
    """Returns the assignments `ids`, int32 [T, k], by expert, in blocks of `bm`. Entries of -1 are
    left out."""
    count = ids.numel()
    most = min(count, triton.cdiv(count, bm) + experts - 1)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(3 * most + 1, dtype=torch.int32, device=ids.device)
    pdl = traits(ids.device).pdl
    chunk = min(4096, max(128, triton.next_power_of_2(count)))
    launch(sort_kernel, (experts,))(
        ids, order, blocks, count, experts, most, BM=bm,
        EP=max(triton.next_power_of_2(experts), 2), CHUNK=chunk, PDL=pdl,
        **options(pdl, num_warps=4 if chunk <= 1024 else 8),
    )  # fmt: skip
    return Sorted(order, blocks, most)
