"""Attention over latents: launches for rows of any length.

The work is divided as in `attention.py`. Blocks of heads take the place of KV heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.choose import current_policy
from quire.ops.kv import KVLayer
from quire.ops.triton.attention.kernels import combine
from quire.ops.triton.attention.latent import stored_latents
from quire.ops.triton.attention.latent_kernels import latent_long, latent_short
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
_MOST_HEADS = 64
"""Heads of a block: the rows of a warpgroup's matrix product."""
_FILLED = 3
"""With this many programs per multiprocessor, rows fill the card without being cut into parts."""


@dataclass(frozen=True)
class LatentTuning:
    """Choices for the launches. By default they follow from the shapes.

    Attributes:
        short: tiles of short rows.
        long: tiles of long rows.
        programs: number of programs, beyond one per row, over which short rows' latents are spread.
        spread: number of programs over which long rows' latents are spread. 0 gives each tile one
            program.
        most_parts: the most parts of a row's latents.
        fixed: see `AttentionTuning`.
    """

    short: Tiles | None = None
    long: Tiles | None = None
    programs: int | None = None
    spread: int | None = None
    most_parts: int = 32
    fixed: bool = False


DEFAULT = LatentTuning()
FIXED = LatentTuning(fixed=True)


def head_block(heads: int) -> int:
    """Returns the number of heads of a program, the largest one that divides all heads evenly."""
    return max(size for size in range(1, _MOST_HEADS + 1) if heads % size == 0)


def tiles_for(queries: int, element_size: int, card: DeviceTraits) -> Tiles:
    """Returns the tiles for up to `queries` (token, head) pairs per tile.

    On an H200, 32 latents of 576 numbers take 37 KB in 16 bits. Tiles of 64 latents would not leave
    enough registers."""
    if element_size > 2 or card.capability < (8, 0):
        return Tiles(16, 16, 4, 1)
    m = min(_MOST_HEADS, max(16, triton.next_power_of_2(queries)))
    if card.shared_memory < 200 * 1024:
        return Tiles(min(m, 16), 16, 4, 2)
    return Tiles(m, 32, 8 if m > 16 else 4, 3)


def latent_schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    heads: int,
    rank: int,
    width: int,
    dtype: torch.dtype,
    tokens: int,
    max_q_len: int,
    even: bool | None = None,
    tuning: LatentTuning | None = None,
) -> Schedule:
    """See `ops.latent_schedule`."""
    tuning = tuning or _tuning()
    card = traits(seq_lens.device)
    group, element = head_block(heads), _element_size(dtype, card)
    blocks, longest = heads // group, max(1, min(max_q_len, _MOST_HEADS // group))
    tiles = tuning.short or tiles_for(longest * group, element, card)
    # One program runs at a time on a multiprocessor.
    programs = card.num_sms if tuning.programs is None else tuning.programs
    if _filled(len(seq_lens), heads, card):
        programs = 0 if even is not False else len(seq_lens) * blocks
    if tuning.most_parts == 1:
        programs = 0
    cuts = Cuts(max(1, tiles.m // group), tiles, programs // blocks, 1, tuning.most_parts, None)
    short = schedule(query_start, seq_lens, cuts, pdl=card.pdl)
    if min(max_q_len, tokens) <= short.longest:
        return short
    tiles = tuning.long or tiles_for(_MOST_HEADS, element, card)
    spread = tuning.spread
    if spread is None:
        alone = tokens * group // tiles.m * blocks
        spread = card.num_sms if 2 * alone <= card.num_sms else 0
    if spread == 0 or tuning.most_parts == 1:
        return short
    long = schedule_long(
        query_start,
        seq_lens,
        tokens=tokens,
        group=group,
        kv_heads=blocks,
        programs=spread,
        shortest=short.longest + 1,
        tiles=tiles,
        most_parts=tuning.most_parts,
        window=None,
        pdl=card.pdl,
    )
    return replace(short, long=long)


def latent_most_skew(seq_lens: Tensor, heads: int) -> float | None:
    """See `ops.most_skew`."""
    card = traits(seq_lens.device)
    depends = _filled(len(seq_lens), heads, card) and not _tuning().fixed
    return len(seq_lens) * (heads // head_block(heads)) / card.num_sms if depends else None


def _filled(rows: int, heads: int, card: DeviceTraits) -> bool:
    """Returns whether rows fill the card without being cut into parts."""
    return rows * (heads // head_block(heads)) > _FILLED * card.num_sms


def latent_attention(
    q: Tensor,
    kv: KVLayer,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rank: int,
    q_lens: Sequence[int] = (),
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    scratch: Mapping[str, Any] | None = None,
    tuning: LatentTuning | None = None,
) -> Tensor:
    """See `ops.latent_attention`.

    Args:
        q_lens: not used.
        max_seq_len: not used.
        scratch: has the result of `latent_schedule` for the same rows under "schedule". Without it
            the schedule is made here.
        tuning: by default it follows from the shapes.
    """
    del q_lens, max_seq_len
    tuning = tuning or _tuning()
    card = traits(q.device)
    tokens, heads, width = q.shape
    out = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    if tokens == 0 or seq_lens.shape[0] == 0:
        return out
    group, element = head_block(heads), _element_size(q.dtype, card)
    max_q_len = min(max_q_len, tokens)
    stored = stored_latents(kv, rank, card)
    work = _LatentLaunch(
        (q, *stored.tensors, out),
        (query_start, seq_lens, block_table),
        stored.strides,
        heads // group,
        scale * _LOG2E,
        {
            "GROUP": group,
            "RANK": rank,
            "R_PAD": max(16, triton.next_power_of_2(rank)),
            "KEY": width - rank,
            "KEY_PAD": max(16, triton.next_power_of_2(width - rank)),
            "BLOCK_TOKENS": kv.k.shape[2],
            "UPCAST": not card.bf16 and q.dtype == torch.bfloat16,
            "PRECISION": "ieee" if element == 4 else "tf32",
            **stored.constants,
        },
        card.pdl,
    )
    if tuning.fixed:
        tiles = tuning.long or tiles_for(_MOST_HEADS, element, card)
        work.long_rows(tiles, shortest=1)
        return out
    made = (scratch or {}).get("schedule")
    plan = made or latent_schedule(
        query_start, seq_lens, heads=heads, rank=rank, width=width, dtype=q.dtype, tokens=tokens,
        max_q_len=max_q_len, tuning=tuning,
    )  # fmt: skip
    # If the schedule was made by this call, kernels must not read it before it is complete.
    work.short_rows(plan, min(plan.longest, max_q_len), pdl=made is not None and card.pdl)
    if plan.long is not None:
        work.long_parts(plan.long, shortest=plan.longest + 1)
    elif max_q_len > plan.longest:
        tiles = tuning.long or tiles_for(_MOST_HEADS, element, card)
        work.long_rows(tiles, shortest=plan.longest + 1)
    return out


def _tuning() -> LatentTuning:
    return FIXED if current_policy().deterministic else DEFAULT


def _element_size(dtype: torch.dtype, card: DeviceTraits) -> int:
    """Returns the bytes of an element as it enters a matrix product."""
    return 4 if dtype == torch.bfloat16 and not card.bf16 else dtype.itemsize


@dataclass(frozen=True)
class _LatentLaunch:
    """The arguments that all launches of one call share.

    Attributes:
        tensors: q, latents, keys, scales, out.
        rows: query_start, seq_lens, block_table.
        stored: strides of latents, see `StoredLatents`.
        blocks: blocks of heads.
    """

    tensors: tuple[Tensor, ...]
    rows: tuple[Tensor, Tensor, Tensor]
    stored: tuple[int, ...]
    blocks: int
    scale: float
    constants: dict[str, Any]
    pdl: bool

    def short_rows(self, plan: Schedule, longest: int, *, pdl: bool) -> None:
        """Launches the kernel for rows of at most `longest` tokens, which fit a tile.

        With `pdl` the schedule was complete before the preceding kernel began, so that this kernel
        may read it early."""
        tiles, out = plan.tiles, self.tensors[-1]
        num_items = plan.items.shape[0]
        partial = lse = out
        if plan.parts:
            partial, lse = self._partial(num_items, tiles)
        launch(latent_short, (self.blocks, num_items))(
            *self.tensors, partial, lse, plan.items, self.rows[2], self.scale, *self._strides(),
            BM=tiles.m, BN=tiles.n, PDL=pdl, PARTS=plan.parts, **self.constants,
            **self._options(tiles, pdl),
        )  # fmt: skip
        if plan.parts:
            queries = min(longest * int(self.constants["GROUP"]), tiles.m)
            self._combine(partial, lse, plan.items, plan.rows, queries, tiles, long=False)

    def long_rows(self, tiles: Tiles, shortest: int) -> None:
        """Launches the kernel for rows of at least `shortest` tokens."""
        most = len(self.tensors[0]) * int(self.constants["GROUP"]) // tiles.m + len(self.rows[1])
        unused = self.tensors[-1], self.tensors[-1], self.rows[0]
        self._long(most, tiles, unused, shortest, parts=False)

    def long_parts(self, plan: LongSchedule, shortest: int) -> None:
        """Launches the kernel for rows of at least `shortest` tokens, with latents in parts."""
        num_items, tiles = plan.items.shape[0], plan.tiles
        partial, lse = self._partial(num_items, tiles)
        buffers = partial, lse, plan.items
        self._long(num_items, tiles, buffers, shortest, parts=True)
        group = int(self.constants["GROUP"])
        self._combine(partial, lse, plan.items, plan.places, group, tiles, long=True)

    def _long(
        self, programs: int, tiles: Tiles, buffers: tuple[Tensor, Tensor, Tensor], shortest: int, *,
        parts: bool,
    ) -> None:  # fmt: skip
        launch(latent_long, (self.blocks, programs))(
            *self.tensors, *buffers, *self.rows, len(self.rows[1]), self.scale, *self._strides(),
            BM=tiles.m, BN=tiles.n, SHORTEST=shortest, PDL=self.pdl, PARTS=parts,
            **self.constants, **self._options(tiles, self.pdl),
        )  # fmt: skip

    def _partial(self, num_items: int, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """Allocates results [BM, R] and logarithms of sums [BM] per item and block of heads."""
        out = self.tensors[-1]
        places = num_items * self.blocks * tiles.m
        partial = torch.empty(places * out.shape[2], dtype=torch.float32, device=out.device)
        return partial, torch.empty(places, dtype=torch.float32, device=out.device)

    def _combine(
        self, partial: Tensor, lse: Tensor, items: Tensor, rows: Tensor, queries: int,
        tiles: Tiles, *, long: bool,
    ) -> None:  # fmt: skip
        out, count = self.tensors[-1], rows.shape[1]
        launch(combine, (count, self.blocks, queries))(
            partial, lse, out, out, items, rows, count, *out.stride()[:2],
            GROUP=self.constants["GROUP"], HEAD_DIM=self.constants["RANK"],
            D_PAD=self.constants["R_PAD"], BM=tiles.m, SINKS=False, LONG=long, PDL=self.pdl,
            **options(self.pdl, num_warps=4),
        )  # fmt: skip

    def _strides(self) -> tuple[int, ...]:
        q, out = self.tensors[0], self.tensors[-1]
        return *q.stride()[:2], *out.stride()[:2], *self.stored, self.rows[2].stride(0)

    def _options(self, tiles: Tiles, pdl: bool) -> dict[str, Any]:
        return options(pdl, num_warps=tiles.warps, num_stages=tiles.stages)
