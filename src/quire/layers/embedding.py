"""Token embeddings, positions, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.pieces import Piece
from quire.parallel import ProcessGroup
from quire.sharding import ShardSpec


class VocabEmbedding(nn.Module):
    """A row per token id, rows shared out over ranks. A vocabulary that does not divide evenly is
    padded: the last rank holds rows that no token uses."""

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        group: ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.group = group
        self.rows = -(-vocab // group.world)
        self.start = group.rank * self.rows
        self.shard = ShardSpec(0, padded=True)
        tensor = torch.zeros(self.rows, width, device=device, dtype=dtype)
        self.weight = nn.Parameter(tensor, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """int [T] -> [T, width]."""
        if self.group.world == 1:
            return ops.embedding(ids, self.weight)
        return self.group.all_reduce(ops.embedding(ids, self.weight, self.start))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, width] -> [N, vocab] in the same dtype, equal on every rank."""
        scores = ops.linear(hidden, self.weight)
        if self.group.world > 1:
            scores = self.group.all_gather(scores)[:, : self.vocab]
        return scores

    def pieces(self) -> Iterator[Piece]:
        shape = self.vocab, self.weight.shape[1]
        low, high = self.shard.bounds(self.vocab, self.group.rank, self.group.world)
        yield Piece("weight", self.weight.data[: high - low], shape, self.shard)


class PositionEmbedding(nn.Module):
    """A learned row per position, held whole by every rank (Radford et al. 2019)."""

    def __init__(
        self, positions: int, width: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        tensor = torch.empty(positions, width, device=device, dtype=dtype)
        self.weight = nn.Parameter(tensor, requires_grad=False)

    def forward(self, positions: Tensor) -> Tensor:
        """int [T] -> [T, width]."""
        return ops.embedding(positions, self.weight)

    def pieces(self) -> Iterator[Piece]:
        yield Piece("weight", self.weight.data, tuple(self.weight.shape))
