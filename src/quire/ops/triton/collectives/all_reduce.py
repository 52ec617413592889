"""All-reduce by writing into peers' memory, with the residual stream added.

Tensors are viewed as words of 32 bits: one float32, or two neighbouring elements of 16 bits. A tile
is a fixed run of words. It has its own place in every rank's buffer, and its own epoch, which
counts the sums of this tile. All ranks compute the same sums in the same order, so their epochs
agree. Each place has two buffers, used in turn. A rank sends the words of epoch e + 2 after it has
received its peers' words of e + 1, which they send after they have read the words of e.

The ranks' terms are added in the order of ranks, in fp32. The residual is added last, and the sum
is rounded once. So every rank has the same bits.

- `one_shot` is for few rows. A rank sends each word to every peer together with the epoch, as one
  store of 64 bits (the LL protocol of NCCL). It needs no fence and no flag.

- `two_shot` is for more rows. Each rank sums a share of every tile, and sends the result. A flag
  per tile follows the words (release and acquire, at system scope).

- `collect` is for sums that overlap other work (`quire.parallel.exchange`). Copy engines transfer
  the whole term of a rank, and a flag follows (`signal`).

All kernels of a rank send before they wait. Waits have a limit, counted in polls of somewhat less
than a microsecond. A kernel that exceeds the limit reports it in host memory, and no later kernel
on that rank waits."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits

ONE_SHOT_TILE = 512
"""Words of a tile of `one_shot`. A program of eight warps sends it; each thread sends two words as
one store of 128 bits."""
TWO_SHOT_TILE = 4096
"""Words of a tile of `two_shot`, by a program of eight warps."""
COLLECT_TILE = 4096
"""Words of a tile of `collect`, by a program of eight warps."""
FAILED, TRIES = 0, 1
"""Words of `Peers.control`."""

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Peers:
    """Describes all ranks to a rank's kernels.

    Buffers are zero before the first sum.

    Attributes:
        rank: this rank, from 0.
        world: number of ranks.
        one_shot: int64 [world] on the device, the address of each rank's buffer of `one_shot`.
        two_shot: int64 [world] on the device, the address of each rank's buffer of `two_shot`.
        flags: int64 [world] on the device, the address of each rank's flags.
        epochs: int32 [tiles], the epochs of the tiles of `one_shot`, then of `two_shot`.
        control: int32 [2] on the device: whether a wait has failed, and the limit of polls.
        report: int32 [3] in pinned host memory, zero until a wait fails. Then it has 1 + the rank
            that did not answer, the site of the sum, and the epoch.
    """

    rank: int
    world: int
    one_shot: Tensor
    two_shot: Tensor
    flags: Tensor
    epochs: Tensor
    control: Tensor
    report: Tensor


def one_shot_words(tiles: int, world: int) -> int:
    """Returns the size of a rank's buffer of `one_shot`, in words of 64 bits."""
    return tiles * 2 * world * ONE_SHOT_TILE


def two_shot_words(tiles: int) -> int:
    """Returns the size of a rank's buffer of `two_shot`, in words of 32 bits."""
    return tiles * 2 * 2 * TWO_SHOT_TILE


def flag_words(tiles: int, world: int) -> int:
    """Returns the size of a rank's flags, in words of 32 bits."""
    return tiles * 2 * world


@triton.jit
def give_up(control_ptr, report_ptr, peer, site, epoch, polls):
    """Returns 1 if a wait must end without success."""
    over = (polls >= tl.load(control_ptr + 1, volatile=True)).to(tl.int32)
    # One atomic read, because the value may change and all threads must see the same value.
    failed = tl.atomic_add(control_ptr, 0, sem="relaxed")
    if (over > 0) & (failed == 0):
        tl.store(control_ptr, 1)
        tl.store(report_ptr + 1, site)
        tl.store(report_ptr + 2, epoch)
        tl.store(report_ptr, 1 + peer)
    return over | failed


@triton.jit
def _receive(ptr, epoch, inside, control_ptr, report_ptr, peer, site):
    """Returns the words at `ptr` [TILE] that a peer sent with the epoch."""
    got = tl.load(ptr, mask=inside, other=0, volatile=True)
    missing = tl.sum((((got >> 32).to(tl.int32) != epoch) & inside).to(tl.int32), 0)
    polls = 0
    while missing > 0:
        got = tl.load(ptr, mask=inside, other=0, volatile=True)
        missing = tl.sum((((got >> 32).to(tl.int32) != epoch) & inside).to(tl.int32), 0)
        polls += 1
        if missing > 0:
            missing *= 1 - give_up(control_ptr, report_ptr, peer, site, epoch, polls)
    return (got & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def await_flag(ptr, epoch, control_ptr, report_ptr, peer, site):
    """Waits until a peer has set a flag to the epoch, and acquires the peer's writes before it."""
    missing = (tl.atomic_add(ptr, 0, sem="acquire", scope="sys") != epoch).to(tl.int32)
    polls = 0
    while missing > 0:
        missing = (tl.atomic_add(ptr, 0, sem="acquire", scope="sys") != epoch).to(tl.int32)
        polls += 1
        if missing > 0:
            missing *= 1 - give_up(control_ptr, report_ptr, peer, site, epoch, polls)


@triton.jit
def low_value(words, KIND: tl.constexpr):
    """The float32, or the first of two elements of 16 bits, as fp32."""
    if KIND.primitive_bitwidth == 32:
        value = words.to(tl.float32, bitcast=True)
    else:
        value = words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return value


@triton.jit
def high_value(words, KIND: tl.constexpr):
    """The second of two elements of 16 bits, as fp32."""
    if KIND.primitive_bitwidth == 32:
        value = words.to(tl.float32, bitcast=True)
    else:
        value = (words >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return value


@triton.jit
def packed(low, high, KIND: tl.constexpr):
    """Rounds two values, or a float32, into a word."""
    if KIND.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = first | second
    return word


@triton.jit(do_not_specialize=["site"])
def one_shot_kernel(
    x_ptr, residual_ptr, out_ptr, peers_ptr, epochs_ptr, control_ptr, report_ptr, words, site,
    RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums a tile per program. Buffers are int64 [tiles, 2 (epochs), WORLD (sender), TILE]."""
    tile = tl.program_id(0)
    at = tl.arange(0, TILE)
    place = tile * TILE + at
    inside = place < words
    bases = ()
    for rank in tl.static_range(WORLD):
        base = tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))
        bases = bases + (tl.multiple_of(base, 16),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.load(x_ptr + place, mask=inside, other=0)
    epoch = tl.load(epochs_ptr + tile) + 1
    stream = own
    if RESIDUAL:
        stream = tl.load(residual_ptr + place, mask=inside, other=0)
    slot = (tile.to(tl.int64) * 2 + (epoch & 1)) * WORLD * TILE
    sent = (own.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
    for step in tl.static_range(1, WORLD):
        tl.store(bases[(RANK + step) % WORLD] + slot + RANK * TILE + at, sent, mask=inside)
    low = tl.zeros([TILE], tl.float32)
    high = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(WORLD):
        part = own
        if rank != RANK:
            from_rank = bases[RANK] + slot + rank * TILE + at
            part = _receive(from_rank, epoch, inside, control_ptr, report_ptr, rank, site)
        low += low_value(part, KIND)
        high += high_value(part, KIND)
    if RESIDUAL:
        low += low_value(stream, KIND)
        high += high_value(stream, KIND)
    tl.store(out_ptr + place, packed(low, high, KIND), mask=inside)
    tl.debug_barrier()
    tl.store(epochs_ptr + tile, epoch)


@triton.jit(do_not_specialize=["site"])
def two_shot_kernel(
    x_ptr, residual_ptr, out_ptr, peers_ptr, flags_ptr, epochs_ptr, control_ptr, report_ptr, words,
    site, RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums a tile per program. Each rank sums a share of the tile.

    Buffers are int32 [tiles, 2 (epochs), 2 (parts, sums), WORLD (sender), SHARE], and flags int32
    [tiles, 2 (parts, sums), WORLD]."""
    SHARE: tl.constexpr = TILE // WORLD
    tile = tl.program_id(0)
    at = tl.arange(0, SHARE)
    bases = ()
    flags = ()
    for rank in tl.static_range(WORLD):
        base = tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32))
        bases = bases + (tl.multiple_of(base, 16),)
        flag = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
        flags = flags + (flag + tile * 2 * WORLD,)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epochs_ptr + tile) + 1
    parts = (tile.to(tl.int64) * 2 + (epoch & 1)) * 2 * TILE
    sums = parts + TILE
    # Sends each other rank its share of this rank's tile.
    for step in tl.static_range(1, WORLD):
        place = tile * TILE + (RANK + step) % WORLD * SHARE + at
        sent = tl.load(x_ptr + place, mask=place < words, other=0)
        tl.store(bases[(RANK + step) % WORLD] + parts + RANK * SHARE + at, sent)
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        tl.atomic_xchg(flags[(RANK + step) % WORLD] + RANK, epoch, sem="release", scope="sys")
    # Sums this rank's share over all ranks.
    place = tile * TILE + RANK * SHARE + at
    inside = place < words
    own = tl.load(x_ptr + place, mask=inside, other=0)
    stream = own
    if RESIDUAL:
        stream = tl.load(residual_ptr + place, mask=inside, other=0)
    low = tl.zeros([SHARE], tl.float32)
    high = tl.zeros([SHARE], tl.float32)
    for rank in tl.static_range(WORLD):
        part = own
        if rank != RANK:
            await_flag(flags[RANK] + rank, epoch, control_ptr, report_ptr, rank, site)
            tl.debug_barrier()
            part = tl.load(bases[RANK] + parts + rank * SHARE + at, cache_modifier=".cg")
        low += low_value(part, KIND)
        high += high_value(part, KIND)
    if RESIDUAL:
        low += low_value(stream, KIND)
        high += high_value(stream, KIND)
    total = packed(low, high, KIND)
    for step in tl.static_range(1, WORLD):
        tl.store(bases[(RANK + step) % WORLD] + sums + RANK * SHARE + at, total)
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        peer_flag = flags[(RANK + step) % WORLD] + WORLD + RANK
        tl.atomic_xchg(peer_flag, epoch, sem="release", scope="sys")
    tl.store(out_ptr + place, total, mask=inside)
    # Receives the sums of the other ranks' shares.
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            await_flag(flags[RANK] + WORLD + rank, epoch, control_ptr, report_ptr, rank, site)
            tl.debug_barrier()
            found = tl.load(bases[RANK] + sums + rank * SHARE + at, cache_modifier=".cg")
            place = tile * TILE + rank * SHARE + at
            tl.store(out_ptr + place, found, mask=place < words)
    tl.debug_barrier()
    tl.store(epochs_ptr + tile, epoch)


@triton.jit
def signal_kernel(flags_ptr, epoch_ptr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Signals to every peer that this rank's term of the next sum is in the peer's memory.

    For `flags_ptr` see `Parts.flags`."""
    epoch = tl.load(epoch_ptr) + 1
    for step in tl.static_range(1, WORLD):
        flag = tl.load(flags_ptr + (RANK + step) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag + RANK, epoch, sem="release", scope="sys")
    tl.store(epoch_ptr, epoch)


@triton.jit(do_not_specialize=["site"])
def collect_kernel(
    x_ptr, residual_ptr, out_ptr, parts_ptr, flags_ptr, epoch_ptr, control_ptr, report_ptr, words,
    stride, site, RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sums a tile per program, after the peers' terms have arrived.

    `parts_ptr` is int32 [WORLD - 1, stride], beginning with the next rank's term. `flags_ptr` is
    int32 [WORLD]. The sum's `signal_kernel` must run before, because it sets the epoch."""
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < words
    epoch = tl.load(epoch_ptr)
    own = tl.load(x_ptr + place, mask=inside, other=0)
    low = tl.zeros([TILE], tl.float32)
    high = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(WORLD):
        part = own
        if rank != RANK:
            await_flag(flags_ptr + rank, epoch, control_ptr, report_ptr, rank, site)
            tl.debug_barrier()
            from_rank = parts_ptr + (rank - RANK - 1 + WORLD) % WORLD * stride.to(tl.int64)
            part = tl.load(from_rank + place, mask=inside, other=0, cache_modifier=".cg")
        low += low_value(part, KIND)
        high += high_value(part, KIND)
    if RESIDUAL:
        stream = tl.load(residual_ptr + place, mask=inside, other=0)
        low += low_value(stream, KIND)
        high += high_value(stream, KIND)
    tl.store(out_ptr + place, packed(low, high, KIND), mask=inside)


def words_of(x: Tensor) -> int | None:
    """Returns the number of 32-bit words of a tensor, or None if these kernels cannot sum it."""
    if x.dtype not in KINDS or not x.is_contiguous():
        return None
    count, rest = divmod(x.numel() * x.dtype.itemsize, 4)
    return None if rest or x.storage_offset() * x.dtype.itemsize % 4 else count


def one_shot(peers: Peers, x: Tensor, residual: Tensor | None, site: int) -> Tensor:
    """Returns the sum of all ranks' x, plus the residual.

    Args:
        x: contiguous, see `words_of`. It must fit into the tiles of the buffers.
        site: the number that a failed wait reports.
    """
    return _run(one_shot_kernel, peers, x, residual, site, 0, ONE_SHOT_TILE, (peers.one_shot,), 8)


def two_shot(
    peers: Peers, x: Tensor, residual: Tensor | None, site: int, first_epoch: int
) -> Tensor:
    """Returns the same as `one_shot`. The epochs of `two_shot` begin at `first_epoch`."""
    own = (peers.two_shot, peers.flags)
    return _run(two_shot_kernel, peers, x, residual, site, first_epoch, TWO_SHOT_TILE, own, 8)


@dataclass(frozen=True, slots=True)
class Parts:
    """The buffers for peers' terms of a series of sums. A sum begins after the previous sum was
    collected.

    Attributes:
        flags: int64 [world], the address of each rank's flags. They are int32 [world], by sender,
            zero before the first sum.
        epoch: int32 [1], number of sums that this rank has signalled.
        own_flags: this rank's flags.
        received: int32 [world - 1, words], the peers' terms, beginning with the next rank's.
    """

    flags: Tensor
    epoch: Tensor
    own_flags: Tensor
    received: Tensor


def signal(peers: Peers, parts: Parts) -> None:
    """Signals to all peers that this rank's term of the next sum is in their memory.

    It runs without programmatic dependent launch, because the copies before it on the stream must
    have ended."""
    launch(signal_kernel, (1,))(
        parts.flags, parts.epoch, RANK=peers.rank, WORLD=peers.world, num_warps=1
    )


def collect(
    peers: Peers, parts: Parts, x: Tensor, residual: Tensor | None, out: Tensor, site: int
) -> None:
    """Writes the sum of all ranks' x, plus the residual, to `out`.

    Args:
        x: this rank's term. It has been sent to the peers and signalled.
        site: the number that a failed wait reports.
    """
    words = words_of(x)
    if not words:
        return
    seen = x.view(-1).view(torch.int32)
    stream = seen if residual is None else residual.view(-1).view(torch.int32)
    # No dependent launch, because the kernel follows a wait for another stream.
    launch(collect_kernel, (triton.cdiv(words, COLLECT_TILE),))(
        seen, stream, out.view(-1).view(torch.int32), parts.received, parts.own_flags, parts.epoch,
        peers.control, peers.report, words, parts.received.stride(0), site,
        RANK=peers.rank, WORLD=peers.world, TILE=COLLECT_TILE, KIND=KINDS[x.dtype],
        RESIDUAL=residual is not None, num_warps=8,
    )  # fmt: skip


def _run(
    kernel: object,
    peers: Peers,
    x: Tensor,
    residual: Tensor | None,
    site: int,
    first_epoch: int,
    tile: int,
    own: tuple[Tensor, ...],
    warps: int,
) -> Tensor:
    words = words_of(x)
    out = torch.empty_like(x)
    if not words:
        return out
    pdl = traits(x.device).pdl
    seen = x.view(-1).view(torch.int32)
    stream = seen if residual is None else residual.view(-1).view(torch.int32)
    launch(kernel, (triton.cdiv(words, tile),))(
        seen, stream, out.view(-1).view(torch.int32), *own, peers.epochs[first_epoch:],
        peers.control, peers.report, words, site,
        RANK=peers.rank, WORLD=peers.world, TILE=tile, KIND=KINDS[x.dtype],
        RESIDUAL=residual is not None, PDL=pdl, **options(pdl, num_warps=warps),
    )  # fmt: skip
    return out
