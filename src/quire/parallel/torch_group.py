"""Ranks of `torch.distributed`."""

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
"""NVLink multicast stays off: a process that dies with it can take the host's GPUs along."""
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The names of the same from torch 2.13 on, and before."""
_aborting: list[threading.Thread] = []
"""Threads in which communicators end."""


class TorchGroup:
    """Ranks of `torch.distributed` (gloo on CPU, nccl on GPUs); `handle` None is the default group,
    which must be initialized."""

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
        return parts.movedim(0, dim - 1 if dim < 0 else dim).flatten(*_pair(dim, x.dim()))

    def started(self) -> None:
        """Takes note that all ranks are ready: from now on none may let others wait for long."""

    def end_waits(self) -> None:
        """Ends waits of kernels that are not NCCL's, now and for good; from any thread."""

    def check(self, step_id: int) -> None:
        """Checks the collectives of a step that has been read.

        Raises:
            EngineDeadError: a device has waited for another rank in vain.
        """


def _pair(dim: int, dims: int) -> tuple[int, int]:
    """Returns the two neighbouring dimensions that make up `dim` of a gathered tensor."""
    first = dim % dims
    return first, first + 1


def check_no_group() -> None:
    """Raises ConfigError where this process is in a group already: `torch.distributed` has one
    default group for all."""
    if dist.is_initialized():
        raise ConfigError(
            "this process has a group of ranks already, of another LLM or of the caller's own: "
            "call shutdown() on that LLM, or run each in its own process (tensor_parallel_size, "
            "pipeline_parallel_size)",
            "tensor_parallel_size",
        )


def join_group(
    device: torch.device, rendezvous: str, rank: int, world: int, timeout: float
) -> TorchGroup:
    """Meets the other ranks, and returns the group of all.

    device: this rank's; it becomes the process's current one.
    rendezvous: the URL where ranks find each other, of a file or of the first rank's port.
    timeout: seconds that a collective of gloo may take.
    """
    options: dict[str, Any] = {"init_method": rendezvous, "rank": rank, "world_size": world}
    if device.type == "cuda":
        os.environ.update(_SWITCHES)
        torch.cuda.set_device(device)
        # With a device the communicator is made here, not by the first collective.
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
        # Processes take long to come; steps do not.
        limit = timedelta(seconds=timeout)
        dist.distributed_c10d._set_pg_timeout(limit)
    return TorchGroup()


def sum_over_all_ranks(x: Tensor) -> Tensor:
    """Returns the sum of every rank's `x`, those of all stages; overwrites x. Without ranks it is x
    itself."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def abort_group() -> None:
    """Ends the collectives of all groups, also those that a device waits in; from any thread.
    Gloo's end by their own time limit.

    Waits for nothing: the end of a communicator does, for that of others and until the graphs that
    hold its collectives are gone.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        for group in list(dist.distributed_c10d._world.pg_map):
            aborting = threading.Thread(target=group.abort, daemon=True, name="group-abort")
            aborting.start()
            _aborting.append(aborting)


def leave_group(broken: bool = False) -> None:
    """Leaves the group of all ranks, which all do at once. broken: some are gone, and are not
    waited for; `abort_group` was called, and graphs with collectives are gone."""
    if dist.is_initialized():
        if broken and dist.get_backend() == "nccl":
            while _aborting:
                _aborting.pop().join()
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
