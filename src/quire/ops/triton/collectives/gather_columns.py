"""All-gather of a matrix's columns, side by side in the memory of every rank.

A rank stores its columns at their place in its peers' matrices and in its own. Each rank has one
matrix, which the next gather overwrites. So a rank waits twice for each peer. The first flag says
that the peer's readers of the last matrix have finished, the second that its columns have
arrived."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.collectives.all_reduce import Peers, await_flag
from quire.ops.triton.launch import launch, options, traits

TILE = 4096
"""Words of 32 bits of a row that a program stores."""


@dataclass(frozen=True, slots=True)
class RankColumns:
    """The matrices and flags of all ranks.

    Attributes:
        matrices: int64 [world], the address of each rank's matrix.
        own: this rank's matrix, [rows, world x columns].
        flags: int64 [world], the address of each rank's flags. They are int32
            [tiles, 2 (ready, arrived), world], by sender, zero at first.
        epochs: int32 [tiles].
    """

    matrices: Tensor
    own: Tensor
    flags: Tensor
    epochs: Tensor


def tiles_of(rows: int, row_bytes: int) -> int:
    """Returns the number of tiles of a rank's columns."""
    return rows * -(-row_bytes // (4 * TILE))


def flag_words(tiles: int, world: int) -> int:
    """Returns the size of a rank's flags, in words of 32 bits."""
    return tiles * 2 * world


@triton.jit(do_not_specialize=["site"])
def gather_kernel(
    x_ptr, matrices_ptr, flags_ptr, epochs_ptr, control_ptr, report_ptr, words, site,
    RANK: tl.constexpr, WORLD: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores WORDS words of a row per program. A row of x has `words` words, a multiple of 4."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < words
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    bases = ()
    flags = ()
    for rank in tl.static_range(WORLD):
        base = tl.load(matrices_ptr + rank).to(tl.pointer_type(tl.int32))
        bases = bases + (tl.multiple_of(base, 16),)
        flag = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
        flags = flags + (flag + tile * 2 * WORLD,)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epochs_ptr + tile) + 1
    for step in tl.static_range(1, WORLD):
        tl.atomic_xchg(flags[(RANK + step) % WORLD] + RANK, epoch, sem="release", scope="sys")
    own = tl.load(x_ptr + row * words + at, mask=inside, other=0)
    place = (row * WORLD + RANK) * words + at
    tl.store(bases[RANK] + place, own, mask=inside)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            await_flag(flags[RANK] + rank, epoch, control_ptr, report_ptr, rank, site)
            tl.debug_barrier()
            tl.store(bases[rank] + place, own, mask=inside)
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        peer_flag = flags[(RANK + step) % WORLD] + WORLD + RANK
        tl.atomic_xchg(peer_flag, epoch, sem="release", scope="sys")
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            await_flag(flags[RANK] + WORLD + rank, epoch, control_ptr, report_ptr, rank, site)
    tl.debug_barrier()
    tl.store(epochs_ptr + tile, epoch)


def takes(columns: RankColumns, x: Tensor) -> bool:
    """Whether the kernel gathers matrices like x.

    x must be contiguous, as wide as a rank's part, and have no more rows than the matrix."""
    rows, width = columns.own.shape
    parts = columns.matrices.shape[0]
    like = x.dim() == 2 and x.dtype == columns.own.dtype and x.shape[1] * parts == width
    return like and 0 < len(x) <= rows and x.is_contiguous()


def gather_columns(peers: Peers, columns: RankColumns, x: Tensor, site: int) -> Tensor:
    """Returns the ranks' x side by side, in memory that the next call overwrites.

    Args:
        x: see `takes`.
        site: the number that a failed wait reports.
    """
    pdl = traits(x.device).pdl
    words = x.shape[1] * x.dtype.itemsize // 4
    launch(gather_kernel, (len(x), triton.cdiv(words, TILE)))(
        x.view(torch.int32), columns.matrices, columns.flags, columns.epochs, peers.control,
        peers.report, words, site, RANK=peers.rank, WORLD=peers.world, WORDS=TILE, PDL=pdl,
        **options(pdl, num_warps=8),
    )  # fmt: skip
    return columns.own[: len(x)]
