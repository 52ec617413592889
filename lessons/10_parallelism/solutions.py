"""Solutions of the exercises on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def bounds(size: int, unit: int, rank: int, world: int) -> tuple[int, int]:
    if size % (unit * world):
        raise ValueError(f"{size // unit} units cannot be shared out over {world} ranks")
    share = size // world
    return rank * share, (rank + 1) * share


def likeliest(shards: Sequence[Tensor]) -> Tensor:
    best = [shard.max(dim=1) for shard in shards]
    logits = torch.stack([each.values for each in best])
    tokens = torch.stack([
        each.indices + rank * shards[0].shape[1] for rank, each in enumerate(best)
    ])  # fmt: skip
    # `max` takes the first of equals, and ranks are in the order of their tokens.
    return tokens.gather(0, logits.max(dim=0).indices.unsqueeze(0)).squeeze(0)


def busy_share(stages: int, groups: int, steps: int) -> float:
    ticks = max(groups, stages) * steps + min(groups, stages) - 1
    return groups * steps / ticks
