"""Groups of `torch.distributed` ranks: joining, leaving and aborting them."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import ConfigError
from quire.parallel.group import AllReduceNorm

_SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables that switch NVLink multicast off. A process that dies while using multicast can break
the host's GPUs."""
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The function's name since torch 2.13, or its older name."""
_aborting: list[threading.Thread] = []
"""Threads that abort communicators."""


class TorchGroup:
    """A group of `torch.distributed`, with gloo on CPUs and NCCL on GPUs.

    Args:
        handle: the group; None for the default group, which must be initialized.
    """

    halves_from = sys.maxsize

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        return None

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self.handle = handle
        self.rank = dist.get_rank(handle)
        self.world = dist.get_world_size(handle)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.handle)
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = x.new_empty((self.world, *x.shape))
        _gather(parts.view(-1), x.reshape(-1), group=self.handle)
        return parts.movedim(0, dim - 1 if dim < 0 else dim).flatten(*_merged_dims(dim, x.dim()))

    def started(self) -> None:
        """Notes that all ranks are ready. From now on waits for other ranks have a short limit."""

    def end_waits(self) -> None:
        """Ends all present and future waits of kernels other than NCCL's. Any thread may call
        it."""

    def check(self, step_id: int) -> None:
        """Checks that no collective has timed out on this device.

        Args:
            step_id: the step whose results were just read, for the error message.

        Raises:
            EngineDeadError: a kernel's wait for another rank reached its limit.
        """


def _merged_dims(dim: int, dims: int) -> tuple[int, int]:
    """Returns the two neighbouring dimensions that a gather merges: of ranks, and of `dim`."""
    first = dim % dims
    return first, first + 1


def check_no_group() -> None:
    """Raises ConfigError if this process has already joined a group. `torch.distributed` has only
    one default group per process."""
    if dist.is_initialized():
        raise ConfigError(
            "this process has already joined a group of ranks, for another LLM or by the caller: "
            "call shutdown() on that LLM, or run each in its own process (tensor_parallel_size, "
            "pipeline_parallel_size)",
            "tensor_parallel_size",
        )


def join_group(
    device: torch.device, rendezvous: str, rank: int, world: int, timeout: float
) -> TorchGroup:
    """Joins the other ranks, and returns the group of all ranks.

    Args:
        device: device of this rank. It becomes the process's current device.
        rendezvous: URL of a file, or of a port of rank 0, by which ranks find each other.
        rank: number of this rank, from 0.
        world: number of ranks.
        timeout: time limit of gloo's collectives, in seconds.
    """
    options: dict[str, Any] = {"init_method": rendezvous, "rank": rank, "world_size": world}
    if device.type == "cuda":
        os.environ.update(_SWITCHES)
        torch.cuda.set_device(device)
        # With `device_id` the communicator is made here instead of in the first collective.
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
        # The limit is set after joining, because processes may take long to start.
        limit = timedelta(seconds=timeout)
        dist.distributed_c10d._set_pg_timeout(limit)
    return TorchGroup()


def global_rank() -> int:
    """Returns this process's rank among all ranks of all stages; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_all_ranks(x: Tensor) -> Tensor:
    """Returns the sum of `x` over all ranks of all stages, and overwrites x. Without a group it
    returns x unchanged."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def abort_group() -> None:
    """Aborts the collectives of all groups, including those that a device waits in.

    Any thread may call it, and it does not wait. Each communicator is aborted in its own thread,
    because an abort waits for other communicators, and for the end of graphs with its collectives.
    Gloo's collectives end at their time limit.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        for group in list(dist.distributed_c10d._world.pg_map):
            aborting = threading.Thread(target=group.abort, daemon=True, name="group-abort")
            aborting.start()
            _aborting.append(aborting)


def leave_group(broken: bool = False) -> None:
    """Leaves the default group. All ranks must call it together, unless the group is broken.

    Args:
        broken: whether some ranks are gone, so that waiting for them would never end. The caller
            has called `abort_group` and deleted the graphs with collectives.
    """
    if dist.is_initialized():
        if broken and dist.get_backend() == "nccl":
            while _aborting:
                _aborting.pop().join()
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
