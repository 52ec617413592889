"""Collectives of GPUs that write into each other's memory, without NVLink multicast."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import EngineDeadError
from quire.ops.choose import current_policy
from quire.ops.triton.collectives import all_reduce as kernels
from quire.ops.triton.collectives import gather_columns as gather_kernels
from quire.ops.triton.collectives import sum_norm as norm_kernels
from quire.ops.triton.norm import rms_norm
from quire.parallel.group import AllReduceNorm
from quire.parallel.torch_group import TorchGroup

logger = logging.getLogger("quire.parallel")

ONE_SHOT_WORDS = 1 << 18
TWO_SHOT_WORDS = 1 << 22
"""Size of the buffers in words of 4 bytes, for tensors of up to 1 MB and 16 MB."""
_NORMED_ROWS = 4096
"""Rows times ranks in the buffers of fused sums and norms. More rows take several launches."""
_FUSED_ROWS = 16
"""Up to this many rows the matrix products apply norms themselves, at no cost."""
_GATHERED_ROWS = 256
"""Rows of the buffer for gathered logits."""
_MOST_ROWS = 8192
"""Most rows with which fused sums and norms are measured."""
_ALIGNMENT = 1 << 10
_START_TRIES = 100_000_000
_TRIES = 2_000_000
"""Polls before a wait gives up. `_START_TRIES` take minutes, `_TRIES` about three seconds."""
_CALLS, _REPLAYS = 10, 3
"""To time one method, a graph of `_CALLS` sums is replayed `_REPLAYS` times."""

Sum = Callable[[Tensor, Tensor | None, int], Tensor]


class SymmetricGroup(TorchGroup):
    """Sums small tensors with its own kernels, and large ones with NCCL.

    Args:
        device: device of this rank.
        handle: see `TorchGroup`.
        width: elements of a hidden state, for all-reduces that are fused with a norm; 0 for none.
        dtype: dtype of hidden states and logits.
        vocab: size of the vocabulary, for gathering logits; 0 for none.

    Attributes:
        peers: addresses and flags of the other ranks, for kernels.
        limits: most words for the one-shot and the two-shot kernel, see
            `quire.ops.triton.collectives.all_reduce`. `choose` measures them.
        normed_rows: most rows for the kernel that fuses sum and norm. `choose` measures it.
    """

    def __init__(
        self,
        device: torch.device,
        handle: dist.ProcessGroup | None = None,
        width: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        vocab: int = 0,
    ) -> None:
        super().__init__(handle)
        world = self.world
        one_tiles = ONE_SHOT_WORDS // kernels.ONE_SHOT_TILE
        two_tiles = TWO_SHOT_WORDS // kernels.TWO_SHOT_TILE
        # Rows must be aligned to 16 bytes; otherwise sums and norms are not fused.
        words = width * dtype.itemsize // 16 * 4
        rows = _NORMED_ROWS // world if words * 4 == width * dtype.itemsize else 0
        # Bytes of one rank's part of a row of logits. If it is not aligned to 16 bytes, NCCL
        # gathers the logits.
        part = -(-vocab // world) * dtype.itemsize
        part = 0 if part % 16 else part
        tiles = gather_kernels.tiles_of(_GATHERED_ROWS, part)
        sizes = (
            8 * kernels.one_shot_words(one_tiles, world),
            4 * kernels.two_shot_words(two_tiles),
            4 * kernels.flag_words(two_tiles, world),
            4 * norm_kernels.place_words(rows, words, world),
            world * part * _GATHERED_ROWS,
            4 * gather_kernels.flag_words(tiles, world),
        )
        starts = aligned_starts(sizes)
        # The attributes keep the memory alive while kernels may use it.
        self._memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._memory[starts[3] : starts[4]].view(torch.int32).fill_(norm_kernels.EMPTY)
        self._storages = self.share(self._memory.untyped_storage())

        def addresses(start: int) -> Tensor:
            return rank_addresses(self._storages, start, device)

        self._first_epoch = one_tiles
        self.peers = kernels.Peers(
            self.rank,
            world,
            one_shot=addresses(starts[0]),
            two_shot=addresses(starts[1]),
            flags=addresses(starts[2]),
            epochs=torch.zeros(one_tiles + two_tiles, dtype=torch.int32, device=device),
            control=torch.tensor([0, _START_TRIES], dtype=torch.int32, device=device),
            report=torch.zeros(3, dtype=torch.int32, pin_memory=True),
        )
        epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rows = norm_kernels.RowPlaces(addresses(starts[3]), epochs, rows, words)
        self.normed_rows = sys.maxsize if rows else 0
        matrix = self._memory[starts[4] :][: sizes[4]].view(dtype)
        self.columns = gather_kernels.RankColumns(
            matrices=addresses(starts[4]),
            own=matrix.view(_GATHERED_ROWS, world * part // dtype.itemsize),
            flags=addresses(starts[5]),
            epochs=torch.zeros(tiles, dtype=torch.int32, device=device),
        )
        self._sites: dict[str, int] = {}
        self.limits = (ONE_SHOT_WORDS, TWO_SHOT_WORDS)
        # Waiting kernels may occupy the whole GPU. `end_waits` therefore uses a copy, not a kernel.
        self._failed = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A peer may write only after this memory is zero.
        torch.cuda.synchronize(device)
        dist.barrier(handle)

    def share(self, own: torch.UntypedStorage) -> list[torch.UntypedStorage]:
        """Returns the memory of all ranks, mapped to this rank's device.

        Uses CUDA IPC handles instead of `torch.distributed._symmetric_memory`, which keeps groups
        by name for the life of a process. So the ranks of a second engine could not join a group.
        """
        handles: list[Any] = [None] * self.world
        dist.all_gather_object(handles, own._share_cuda_(), group=self.handle)  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        # The first entry of a handle is the device, which is replaced by this rank's.
        return [
            own if rank == self.rank else torch.UntypedStorage._new_shared_cuda(device, *rest)
            for rank, (_, *rest) in enumerate(handles)
        ]

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        words = kernels.words_of(x)
        if words is None or words > max(self.limits) or not residual_matches(x, residual):
            return super().all_reduce(x, residual, name)
        site = self.site(name)
        if words <= self.limits[0]:
            return self.one_shot(x, residual, site)
        return self.two_shot(x, residual, site)

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        policy = current_policy()
        separate = policy.deterministic or "fusions" in policy.disabled
        return None if separate or not self.normed_rows else self._all_reduce_norm

    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, name: str
    ) -> tuple[Tensor, Tensor] | None:
        separate = not _FUSED_ROWS < len(x) <= self.normed_rows
        if separate or not norm_kernels.takes(self.rows, x, residual, weight):
            return None
        return self.normed(x, residual, weight, eps, self.site(name))

    def normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, site: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum and its norm, computed by `sum_norm_kernel`."""
        return norm_kernels.sum_norm(self.peers, self.rows, x, residual, weight, eps, site)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See `ProcessGroup`. Logits are gathered into a buffer that the next call overwrites."""
        if dim == -1 and gather_kernels.takes(self.columns, x):
            return gather_kernels.gather_columns(self.peers, self.columns, x, self.site("logits"))
        return super().all_gather(x, dim)

    def site(self, name: str) -> int:
        """Returns the number that kernels report for a sum of this name when a wait times out."""
        return self._sites.setdefault(name, len(self._sites))

    def one_shot(self, x: Tensor, residual: Tensor | None, site: int = 0) -> Tensor:
        """Returns the sum, computed by `one_shot_kernel`."""
        return kernels.one_shot(self.peers, x, residual, site)

    def two_shot(self, x: Tensor, residual: Tensor | None, site: int = 0) -> Tensor:
        """Returns the sum, computed by `two_shot_kernel`."""
        return kernels.two_shot(self.peers, x, residual, site, self._first_epoch)

    def nccl_sum(self, x: Tensor, residual: Tensor | None, site: int = 0) -> Tensor:
        """Returns the sum, computed by NCCL. Overwrites x."""
        return super().all_reduce(x, residual)

    def choose(self, dtype: torch.dtype) -> None:
        """Measures the sizes up to which each method is fastest. All ranks get the same result."""
        one_most, two_most = self.limits
        methods: list[tuple[Sum, int]] = [
            (self.one_shot, one_most), (self.two_shot, two_most), (self.nccl_sum, two_most),
        ]  # fmt: skip
        best: dict[int, int] = {}
        words = 1 << 11
        while words <= two_most:
            best[words] = self._best(
                [
                    self.seconds(method, words, dtype) if words <= most else float("inf")
                    for method, most in methods
                ]
            )
            words *= 2
        one = _largest_size(best, lambda method: method == 0)
        self.limits = (one, max(one, _largest_size(best, lambda method: method < 2)))
        logger.info("sums over ranks: one-shot up to %d words, two-shot up to %d", *self.limits)
        if self.normed_rows:
            self._choose_normed(dtype)

    def _choose_normed(self, dtype: torch.dtype) -> None:
        """Measures the number of rows up to which the fused sum and norm is faster."""
        words = self.rows.words
        weight = torch.ones(words * 4 // dtype.itemsize, dtype=dtype, device=self._memory.device)

        def fused(x: Tensor, residual: Tensor | None, site: int) -> Tensor:
            return self.normed(x.view(-1, len(weight)), x.view(-1, len(weight)), weight, 1e-6)[1]

        def separate(x: Tensor, residual: Tensor | None, site: int) -> Tensor:
            x = x.view(-1, len(weight))
            return rms_norm(self.all_reduce(x, x), weight, 1e-6)

        best, rows = {}, 2 * _FUSED_ROWS
        while rows <= _MOST_ROWS:
            best[rows] = self._best(
                [self.seconds(method, rows * words, dtype) for method in (fused, separate)]
            )
            rows *= 2
        most = _largest_size(best, lambda method: method == 0)
        # If fusing wins with the most rows measured, it is used for any number.
        self.normed_rows = sys.maxsize if most == _MOST_ROWS else most
        logger.info("sums over ranks: fused with the norm up to %d rows", most)

    def _best(self, times: list[float]) -> int:
        """Returns the index of the method with the least time, summed over all ranks."""
        totals = torch.tensor(times, device=self._memory.device)
        dist.all_reduce(totals, group=self.handle)
        return int(totals.argmin())

    def seconds(self, method: Sum, words: int, dtype: torch.dtype) -> float:
        """Returns the time of one sum in a captured graph, in seconds. All ranks must call it with
        the same arguments."""
        device = self._memory.device
        x = torch.zeros(words * 4 // dtype.itemsize, dtype=dtype, device=device)
        method(x, x, 0)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(_CALLS):
                method(x, x, 0)
            graph.capture_end()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / (_CALLS * _REPLAYS)

    def started(self) -> None:
        self.peers.control[kernels.TRIES] = _TRIES

    def end_waits(self) -> None:
        with torch.cuda.stream(self._side):
            self.peers.control[: kernels.TRIES].copy_(self._failed, non_blocking=True)

    def check(self, step_id: int) -> None:
        waited, site, epoch = self.peers.report.tolist()
        if waited:
            where = next((name for name, at in self._sites.items() if at == site), "")
            raise EngineDeadError(
                f"rank {self.rank} gave up waiting for rank {waited - 1} in {where or 'a sum'}, "
                f"found when step {step_id} was read (sum number {epoch})"
            )


def aligned_starts(sizes: Sequence[int]) -> list[int]:
    """Returns the aligned offsets of parts with these sizes in one buffer, then its total size."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return starts


def rank_addresses(
    storages: Sequence[torch.UntypedStorage], start: int, device: torch.device
) -> Tensor:
    """Returns the address of byte `start` in each rank's memory, int64 [world]."""
    addresses = [storage.data_ptr() + start for storage in storages]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def residual_matches(x: Tensor, residual: Tensor | None) -> bool:
    """Returns whether a kernel can add the residual, which may be None, to a sum of x."""
    if residual is None:
        return True
    same = residual.shape == x.shape and residual.dtype == x.dtype
    return same and kernels.words_of(residual) is not None


def _largest_size(best: dict[int, int], wanted: Callable[[int], bool]) -> int:
    """Returns the largest size whose best method fulfils `wanted`, or 0.

    For smaller sizes the method is better still, so single measurements against it are ignored.
    """
    return max((words for words, method in best.items() if wanted(method)), default=0)


def symmetric_group(
    device: torch.device,
    dtype: torch.dtype,
    handle: dist.ProcessGroup | None = None,
    width: int = 0,
    vocab: int = 0,
) -> TorchGroup:
    """Returns a `SymmetricGroup` if all ranks can access each other's memory, else a `TorchGroup`.

    All ranks must call it together.

    Args:
        device: device of this rank.
        dtype: dtype of the tensors to sum.
        handle: the ranks; None for the default group.
        width: see `SymmetricGroup`.
        vocab: see `SymmetricGroup`. Only one matrix of gathered logits may be in use at a time.
    """
    plain = TorchGroup(handle)
    own = device.index or 0
    # Device numbers can be compared because ranks of one host see the same devices.
    all_devices = plain.all_gather(torch.tensor([own], device=device), dim=0).tolist()
    others = all_devices[: plain.rank] + all_devices[plain.rank + 1 :]
    reachable = all(torch.cuda.can_device_access_peer(own, other) for other in others)
    if not _all_agree(reachable, device, handle):
        logger.warning("GPUs have no access to each other's memory: NCCL does all sums")
        return plain
    group = None
    try:
        group = SymmetricGroup(device, handle, width, dtype, vocab)
    except RuntimeError as error:
        logger.warning("symmetric memory is not available (%s): NCCL does all sums", error)
    if not _all_agree(group is not None, device, handle) or group is None:
        return plain
    group.choose(dtype)
    group.check(0)
    return group


def _all_agree(vote: bool, device: torch.device, handle: dist.ProcessGroup | None) -> bool:
    count = torch.tensor(int(vote), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=handle)
    return bool(count.item())
