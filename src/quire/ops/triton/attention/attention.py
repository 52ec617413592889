"""Paged attention for mixed batches: rows of any length against a block-paged KV cache.

Short rows (decode, drafts) have one tile of queries, and their KV is spread over programs
(split-KV). Long rows have many tiles. In a step of many tokens these tiles fill the card, and one
program reads all KV of a tile. In a step of fewer tokens, such as a prompt with a cached prefix,
the KV of long rows is spread over programs too. The device assigns rows to kernels by `query_start`
and `seq_lens`. Grids depend only on static bounds (token bucket, row bucket, `max_q_len`), so one
CUDA graph serves any mix of rows within a bucket."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.choose import current_policy
from quire.ops.kv import AttentionHeads, KVFormat, KVLayer
from quire.ops.triton.attention import kv8
from quire.ops.triton.attention.kernels import attend_long, attend_short, combine
from quire.ops.triton.attention.schedule import (
    Cuts,
    LongSchedule,
    Schedule,
    Tiles,
    schedule,
    schedule_long,
)
from quire.ops.triton.launch import DeviceTraits, launch, options, traits

_LOG2E = math.log2(math.e)
_FILLED = 3
"""With this many programs per multiprocessor, rows fill the card without being cut into parts."""
_CROWDED = 8
"""From this many programs per multiprocessor on, short rows are not cut into parts. The longest row
then ends while waves of other rows still run."""
_EVEN = 1.25
"""Rows of up to so many times the mean length do not make the others wait if they are not cut."""
_ONE_WAVE = 5
"""Programs per multiprocessor that run at once, with one KV tile in flight each."""
_THREE_AT_ONCE = 168
"""Registers per thread with which three programs of four warps run at once on a multiprocessor."""
_MANY = 1 << 30
_WIDE = 256
"""For heads of more dimensions, registers limit the size of tiles."""
_SHORT_TILE = 64
"""If all rows of a bucket fit a tile of this many (token, head) pairs, no kernel for long rows is
launched."""


@dataclass(frozen=True)
class AttentionTuning:
    """Choices for the launches. By default they follow from the shapes.

    Attributes:
        decode: tiles of short rows.
        prefill: tiles of long rows.
        programs: number of programs, beyond one per row, over which short rows' KV is spread.
        min_tiles: the fewest KV tiles of a part of a short row.
        most_parts: the most parts of a short row's KV, or of the KV of one tile of a long row.
        spread: number of programs over which long rows' KV is spread if there are fewer tiles of
            queries. 0 gives each tile one program.
        prefetch: whether the first KV tile is loaded before the wait for the predecessor.
        pdl: programmatic dependent launch. None uses it on cards that have it.
        upcast: compute in fp32. None does so if the tensor cores do not support bf16.
        wgmma: whether the kernel for Hopper cards serves the long rows that it supports. It never
            does if `prefill` is set.
        fixed: one kernel, one tile and one order of summation for every row, so results do not
            depend on the rest of the batch.
    """

    decode: Tiles | None = None
    prefill: Tiles | None = None
    programs: int | None = None
    min_tiles: int = 1
    most_parts: int = 32
    spread: int | None = None
    prefetch: bool | None = None
    pdl: bool | None = None
    upcast: bool | None = None
    wgmma: bool = True
    fixed: bool = False


DEFAULT = AttentionTuning()
FIXED = AttentionTuning(fixed=True)


def _tuning() -> AttentionTuning:
    return FIXED if current_policy().deterministic else DEFAULT


def decode_tiles(
    queries: int, d_pad: int, element_size: int, kv_format: KVFormat, rows: int, kv_heads: int,
    card: DeviceTraits, even: bool | None = None,
) -> Tiles:  # fmt: skip
    """Returns the tiles of short rows.

    Args:
        queries: number of (token, head) pairs of the longest short row.
        even: see `ops.attention_schedule`.
    """
    m = max(16, triton.next_power_of_2(queries))
    if card.capability < (8, 0):
        return Tiles(m, 32, 4, 1)
    if d_pad > _WIDE:
        return Tiles(m, 32, 4 if m == 16 else 8, 2)
    if kv_format.scales != "none":
        # 8-bit KV has half the bytes but needs as many instructions. So few instructions per byte
        # and many programs at once matter most.
        if kv_format.scales == "token" and d_pad <= 128 and m <= 32:
            # Integers gain more from registers, unless there are programs for several waves.
            three = not kv_format.offset or rows * kv_heads > _ONE_WAVE * card.num_sms
            return Tiles(m, 128, 4, 3, _THREE_AT_ONCE if m == 16 and three else None)
        return Tiles(m, 64, 4, 4 if m <= 16 and d_pad <= 128 else 3)
    # With many programs at once, each needs fewer loads in flight. The exception are rows whose
    # lengths differ, because their last programs run with few others. A little more than one wave
    # of programs from many rows counts as such.
    programs = rows * kv_heads
    ragged = rows > card.num_sms and programs <= _ONE_WAVE * card.num_sms
    shallow = programs > _FILLED * card.num_sms and not ragged and even is not False
    return Tiles(m, 64 if d_pad * element_size <= 256 else 32, 4, 2 if shallow else 3)


def prefill_tiles(
    pairs: int, head_dim: int, element_size: int, card: DeviceTraits, *, cut: bool = False
) -> Tiles:
    """Returns the tiles of long rows.

    Args:
        pairs: upper bound of the (token, head) pairs of a step.
        cut: whether the KV of a tile is cut into parts.
    """
    d_pad = max(16, triton.next_power_of_2(head_dim))
    if element_size > 2 or card.capability < (8, 0):
        # Tensor cores do not support this dtype. FMAs compute the product from registers.
        return Tiles(32, 32 if d_pad <= 128 else 16, 4, 1)
    if d_pad > _WIDE:
        return Tiles(32, 32, 8, 2) if card.shared_memory >= 160 * 1024 else Tiles(16, 16, 4, 2)
    if card.shared_memory < 160 * 1024:
        return Tiles(64, 32 if d_pad <= 128 else 16, 4, 2)
    if d_pad > 128:
        return Tiles(128, 64 if card.shared_memory >= 200 * 1024 else 32, 8, 2)
    if card.shared_memory < 200 * 1024:
        return Tiles(128, 64, 4 if d_pad <= 64 else 8, 3)
    if cut:
        return Tiles(64, 64, 4, 3)  # Two run at once, with all KV of a short part in flight.
    if pairs <= 96 * card.num_sms:
        return Tiles(64, 128, 4, 2)  # Few pairs: smaller tiles keep more multiprocessors busy.
    return Tiles(128, 128, 8, 2)


def short_cuts(
    rows: int, heads: AttentionHeads, max_q_len: int, card: DeviceTraits,
    tuning: AttentionTuning | None = None, even: bool | None = None,
) -> Cuts:  # fmt: skip
    """Returns how the KV of short rows is cut.

    Args:
        even: see `ops.attention_schedule`.
    """
    tuning = tuning or _tuning()
    group, kv_format = heads.heads // heads.kv_heads, heads.kv_format
    d_pad = _padded(heads.head_dim, kv_format)
    width = _width(heads.dtype, kv_format, card, tuning)
    tiles = tuning.decode or _short_tiles(
        group, max_q_len, d_pad, width, kv_format, rows, heads.kv_heads, card, even
    )
    programs = tuning.programs
    if programs is None:
        programs = _more_programs(rows * heads.kv_heads, kv_format, card, even)
    most = tuning.most_parts
    return Cuts(
        longest=max(1, tiles.m // group),
        tiles=tiles,
        spare=programs // heads.kv_heads if most > 1 else 0,
        min_tiles=tuning.min_tiles,
        most_parts=most,
        window=heads.window,
    )


def attention_schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    tokens: int,
    max_q_len: int,
    window: int | None = None,
    even: bool | None = None,
    tuning: AttentionTuning | None = None,
) -> Schedule:
    """See `ops.attention_schedule`."""
    tuning = tuning or _tuning()
    card = traits(seq_lens.device)
    group, width = heads // kv_heads, _width(dtype, kv_format, card, tuning)
    own = AttentionHeads(heads, kv_heads, head_dim, dtype, kv_format, window)
    cuts = short_cuts(seq_lens.shape[0], own, max_q_len, card, tuning, even)
    pdl = card.pdl if tuning.pdl is None else tuning.pdl
    short = schedule(query_start, seq_lens, cuts, pdl=pdl)
    if min(max_q_len, tokens) <= short.longest:
        return short
    tiles = tuning.prefill or prefill_tiles(tokens * heads, head_dim, width, card, cut=True)
    spread = _spread(tokens * group // tiles.m * kv_heads, tiles, card, tuning)
    if spread == 0:
        return short
    long = schedule_long(
        query_start,
        seq_lens,
        tokens=tokens,
        group=group,
        kv_heads=kv_heads,
        programs=spread,
        shortest=short.longest + 1,
        tiles=tiles,
        most_parts=tuning.most_parts,
        window=window,
        pdl=pdl,
    )
    return replace(short, long=long)


def most_skew(seq_lens: Tensor, attention: AttentionHeads) -> float | None:
    """See `ops.most_skew`."""
    card = traits(seq_lens.device)
    programs = len(seq_lens) * attention.kv_heads
    if _tuning().fixed or programs <= _FILLED * card.num_sms:
        return None
    # With several waves of programs, a longer row ends while the later waves still run.
    return max(_EVEN, programs / (_ONE_WAVE * card.num_sms))


def _more_programs(
    programs: int, kv_format: KVFormat, card: DeviceTraits, even: bool | None = None
) -> int:
    """Returns the number of programs, beyond one per row, over which short rows' KV is spread."""
    # A program needs as long for an 8-bit tile as for a 16-bit one of twice the bytes.
    each = 2 if kv_format.scales == "none" else 4
    if programs <= _FILLED * card.num_sms:
        return each * card.num_sms
    if even is False:
        # Parts have at most the mean length of rows, so long rows end with the others.
        return programs
    if even or programs > _CROWDED * card.num_sms:
        return 0
    # Only rows of more than 1.5 times the mean length are cut. Uncut, they would make all others
    # wait.
    return min(2 * each * card.num_sms, programs * 2 // 3)


def _spread(programs: int, tiles: Tiles, card: DeviceTraits, tuning: AttentionTuning) -> int:
    """Returns the number of programs over which long rows' KV is spread, or 0.

    Args:
        programs: number of programs without spreading: one for each tile of queries.
    """
    if tuning.most_parts == 1:
        return 0
    if tuning.spread is not None:
        return tuning.spread
    at_once = 2 if tiles.m * tiles.n <= 64 * 64 else 1
    return at_once * card.num_sms if 2 * programs <= card.num_sms else 0


def _short_tiles(
    group: int, max_q_len: int, d_pad: int, width: int, kv_format: KVFormat, rows: int,
    kv_heads: int, card: DeviceTraits, even: bool | None,
) -> Tiles:  # fmt: skip
    fits = max_q_len * group <= _SHORT_TILE
    queries = max_q_len * group if fits else group
    return decode_tiles(queries, d_pad, width, kv_format, rows, kv_heads, card, even)


def _width(
    dtype: torch.dtype, kv_format: KVFormat, card: DeviceTraits, tuning: AttentionTuning
) -> int:
    """Returns the bytes of an element as it enters a matrix product."""
    if kv_format.scales != "none":
        return 2
    return 4 if _upcast(dtype, card, tuning) else dtype.itemsize


def _upcast(dtype: torch.dtype, card: DeviceTraits, tuning: AttentionTuning) -> bool:
    upcast = not card.bf16 and dtype == torch.bfloat16
    return upcast if tuning.upcast is None else tuning.upcast


def paged_attention(
    q: Tensor,
    kv: KVLayer,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    q_lens: Sequence[int] = (),
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scratch: Mapping[str, Any] | None = None,
    tuning: AttentionTuning | None = None,
) -> Tensor:
    """Computes causal attention of each row's last `q_len` positions over its `seq_len` stored
    positions.

    Returns [T, heads, D]. The results of padding are undefined.

    Args:
        q: [T, heads, D], the last dimension dense.
        kv: any block, head and token stride; block_size a power of two.
        query_start: int32 [R + 1]. Rows of length 0 are padding.
        seq_lens: int32 [R], including this step's tokens.
        block_table: int32 [R, max_blocks].
        q_lens: not used.
        max_q_len: upper bound of the rows' numbers of tokens, known to the host.
        max_seq_len: not used.
        scale: factor of scores.
        window: number of positions that a query sees, including its own.
        softcap: scores become `cap * tanh(score / cap)`.
        sinks: [heads], a score of each head that joins the softmax and has no value.
        scratch: has the result of `attention_schedule` for the same rows under "schedule". Without
            it the schedule is made here.
        tuning: by default it follows from the shapes.
    """
    del q_lens, max_seq_len
    tuning = tuning or _tuning()
    card = traits(q.device)
    tokens, heads, head_dim = q.shape
    kv_heads = kv.k.shape[1]
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if tokens == 0 or seq_lens.shape[0] == 0:
        return out
    width = _width(q.dtype, kv.format, card, tuning)
    max_q_len = min(max_q_len, tokens)
    pdl = card.pdl if tuning.pdl is None else tuning.pdl
    launch = _Launch(
        (q, *_stored(kv), q if sinks is None else sinks, out),
        (query_start, seq_lens, block_table),
        (scale * _LOG2E, 0.0) if softcap is None else (2.0 * scale / softcap, softcap * _LOG2E),
        window or 0,
        {
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "D_PAD": _padded(head_dim, kv.format),
            "BLOCK_TOKENS": kv.k.shape[2],
            "WINDOW": window is not None,
            "SOFTCAP": softcap is not None,
            "SINKS": sinks is not None,
            "UPCAST": _upcast(q.dtype, card, tuning),
            "PRECISION": "ieee" if width == 4 else "tf32",
            **kv8.constants(kv.format, card),
        },
        pdl,
    )
    if tuning.fixed:
        few = max_q_len * heads // kv_heads <= _SHORT_TILE
        if not launch.launch_wgmma(kv, tuning, 1, card, few):
            long_tiles = tuning.prefill or prefill_tiles(_MANY, head_dim, width, card)
            launch.long_rows(long_tiles, shortest=1, one_loop=True)
        return out
    made = (scratch or {}).get("schedule")
    complete = made is not None and pdl
    plan = made or attention_schedule(
        query_start, seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        dtype=q.dtype, kv_format=kv.format, tokens=tokens, max_q_len=max_q_len, window=window,
        tuning=tuning,
    )  # fmt: skip
    prefetch = (
        seq_lens.shape[0] * kv_heads <= card.num_sms if tuning.prefetch is None else tuning.prefetch
    )
    launch.short_rows(plan, min(plan.longest, max_q_len), pdl=complete, prefetch=prefetch)
    if plan.long is not None:
        launch.long_parts(plan.long, shortest=plan.longest + 1)
    elif max_q_len > plan.longest and not launch.launch_wgmma(kv, tuning, plan.longest + 1, card):
        long_tiles = tuning.prefill or prefill_tiles(tokens * heads, head_dim, width, card)
        launch.long_rows(long_tiles, shortest=plan.longest + 1)
    return out


@functools.cache
def _hopper(card: DeviceTraits) -> ModuleType | None:
    """Returns the module that launches the kernel for Hopper cards. Returns None on other cards."""
    return importlib.import_module("quire.ops.triton.attention.hopper") if card.gluon else None


def _stored(kv: KVLayer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns k, v, k_scale and v_scale as kernels read them.

    8-bit values are viewed as pairs. If there are no scales, another tensor takes their place, and
    kernels do not read it."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k, kv.v, kv.k, kv.v
    return kv.k.view(torch.int16), kv.v.view(torch.int16), kv.k_scale, kv.v_scale


def _padded(head_dim: int, kv_format: KVFormat) -> int:
    """Returns the dimensions of a tile. A matrix product needs at least 16, or 16 pairs."""
    return max(16 if kv_format.scales == "none" else 32, triton.next_power_of_2(head_dim))


def _options(tiles: Tiles, pdl: bool) -> dict[str, Any]:
    limit = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    return options(pdl, num_warps=tiles.warps, num_stages=tiles.stages, **limit)


@dataclass(frozen=True)
class _Launch:
    """The arguments that all launches of one call share.

    Attributes:
        tensors: q, k, v, k_scale, v_scale, sinks, out.
        rows: query_start, seq_lens, block_table.
        scales: the factor of scores, and the softcap.
        window: positions that a query sees.
        constants: compile-time constants of the kernels.
        pdl: programmatic dependent launch.
    """

    tensors: tuple[Tensor, ...]
    rows: tuple[Tensor, Tensor, Tensor]
    scales: tuple[float, float]
    window: int
    constants: dict[str, Any]
    pdl: bool

    def short_rows(self, plan: Schedule, longest: int, *, pdl: bool, prefetch: bool) -> None:
        """Launches the kernel for rows of at most `longest` tokens, which fit a tile.

        Set `pdl` only if the schedule was complete before the preceding kernel began, because this
        kernel then reads the schedule early."""
        tiles, out = plan.tiles, self.tensors[-1]
        num_items, kv_heads = plan.items.shape[0], self.tensors[1].shape[1]
        partial = lse = out
        if plan.parts:
            partial, lse = self._partial(num_items, tiles)
        launch(attend_short, (kv_heads, num_items))(
            *self.tensors, partial, lse, plan.items, self.rows[2], *self._numbers(),
            BM=tiles.m, BN=tiles.n, PDL=pdl, PREFETCH=prefetch, PARTS=plan.parts,
            **self.constants, **_options(tiles, pdl),
        )  # fmt: skip
        if plan.parts:
            queries = min(longest * int(self.constants["GROUP"]), tiles.m)
            self._combine(partial, lse, plan.items, plan.rows, queries, tiles, long=False)

    def launch_wgmma(
        self, kv: KVLayer, tuning: AttentionTuning, shortest: int, card: DeviceTraits,
        few: bool = False,
    ) -> bool:  # fmt: skip
        """Launches the kernel for Hopper cards for rows of at least `shortest` tokens, if it
        supports them. Returns whether it does.

        Args:
            few: no row has more (token, head) pairs than one warpgroup's tile.
        """
        module = _hopper(card) if tuning.wgmma and tuning.prefill is None else None
        q, out = self.tensors[0], self.tensors[-1]
        if module is None or not module.takes(q, kv):
            return False
        module.attend_long_rows(
            q, kv, self.tensors[-2] if self.constants["SINKS"] else None, out, self.rows,
            self.scales, softcap=self.constants["SOFTCAP"],
            window=self.window if self.constants["WINDOW"] else None, shortest=shortest,
            pdl=self.pdl, tiles=module.few_tiles(kv, card.num_sms) if few else None,
        )  # fmt: skip
        return True

    def long_rows(self, tiles: Tiles, shortest: int, one_loop: bool = False) -> None:
        """Launches the kernel for rows of at least `shortest` tokens."""
        (tokens, heads, _), kv_heads = self.tensors[0].shape, self.tensors[1].shape[1]
        rows = len(self.rows[1])
        most = tokens * (heads // kv_heads) // tiles.m + rows
        unused = self.tensors[-1], self.tensors[-1], self.rows[0]
        self._long((kv_heads, most), tiles, unused, shortest, one_loop)

    def long_parts(self, plan: LongSchedule, shortest: int) -> None:
        """Launches the kernel for rows of at least `shortest` tokens, with their KV in parts."""
        num_items, tiles = plan.items.shape[0], plan.tiles
        partial, lse = self._partial(num_items, tiles)
        grid = self.tensors[1].shape[1], num_items
        self._long(grid, tiles, (partial, lse, plan.items), shortest, parts=True)
        group = int(self.constants["GROUP"])
        self._combine(partial, lse, plan.items, plan.places, group, tiles, long=True)

    def _long(
        self, grid: tuple[int, int], tiles: Tiles, parts_of: tuple[Tensor, Tensor, Tensor],
        shortest: int, one_loop: bool = False, parts: bool = False,
    ) -> None:  # fmt: skip
        launch(attend_long, grid)(
            *self.tensors, *parts_of, *self.rows, len(self.rows[1]), *self._numbers(), BM=tiles.m,
            BN=tiles.n, SHORTEST=shortest, ONE_LOOP=one_loop, PDL=self.pdl, PARTS=parts,
            **self.constants, **_options(tiles, self.pdl),
        )  # fmt: skip

    def _partial(self, num_items: int, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """Allocates results [BM, D] and logarithms of sums [BM] for each item and KV head."""
        q, k = self.tensors[:2]
        places = num_items * k.shape[1] * tiles.m
        partial = torch.empty(places * q.shape[2], dtype=torch.float32, device=q.device)
        return partial, torch.empty(places, dtype=torch.float32, device=q.device)

    def _combine(
        self, partial: Tensor, lse: Tensor, items: Tensor, rows: Tensor, queries: int,
        tiles: Tiles, *, long: bool,
    ) -> None:  # fmt: skip
        out, kv_heads, count = self.tensors[-1], self.tensors[1].shape[1], rows.shape[1]
        launch(combine, (count, kv_heads, queries))(
            partial, lse, self.tensors[-2], out, items, rows, count, *out.stride()[:2],
            GROUP=self.constants["GROUP"], HEAD_DIM=self.constants["HEAD_DIM"],
            D_PAD=self.constants["D_PAD"], BM=tiles.m, SINKS=self.constants["SINKS"], LONG=long,
            PDL=self.pdl, **options(self.pdl, num_warps=2),
        )  # fmt: skip

    def _numbers(self) -> tuple[float, ...]:
        q, k, v, k_scale, _, _, out = self.tensors
        own = k_scale.stride()[:2] if self.constants["OWN_SCALES"] else (0, 0)
        return (
            *self.scales, self.window, *q.stride()[:2], *out.stride()[:2], *k.stride()[:3],
            *v.stride()[:3], *own, self.rows[2].stride(0),
        )  # fmt: skip
