"""Ranks of `torch.distributed`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TorchGroup:
    """Ranks of `torch.distributed` (gloo on CPU, nccl on GPUs); `handle` None is the default group,
    which must be initialized."""

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self.handle = handle
        self.rank = dist.get_rank(handle)
        self.world = dist.get_world_size(handle)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x, group=self.handle)
        return torch.cat(parts, dim=dim)


def join_group(backend: str, store: str, rank: int, world: int) -> TorchGroup:
    """Meets the other ranks, and returns the group of all. store: a file that they share."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    return TorchGroup()


def leave_group() -> None:
    """Leaves the group of all ranks."""
    dist.destroy_process_group()
