"""Token embeddings, positions, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.build import Build
from quire.layers.linear import Linear, Output
from quire.layers.parameter_slice import ParameterSlice
from quire.parallel.sharding import ShardSpec


class VocabEmbedding(nn.Module):
    """Token embeddings. Each rank holds the rows of its share of the vocabulary.

    If the vocabulary does not divide evenly, the last rank holds rows that no token uses.
    """

    def __init__(self, vocab: int, width: int, build: Build) -> None:
        super().__init__()
        self.vocab = vocab
        self.group = build.group
        self.rows = -(-vocab // self.group.world)
        self.start = self.group.rank * self.rows
        tensor = torch.zeros(self.rows, width, device=build.device, dtype=build.dtype)
        self.weight = nn.Parameter(tensor, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [T, width] of token ids, int [T]."""
        if self.group.world == 1:
            return ops.embedding(ids, self.weight)
        rows = ops.embedding(ids, self.weight, self.start)
        return self.group.all_reduce(rows, name="embedding")

    def slices(self) -> Iterator[ParameterSlice]:
        width = self.weight.shape[1]
        low, high = ShardSpec(0, padded=True).bounds(self.vocab, self.group.rank, self.group.world)
        target, ranges = self.weight.data[: high - low], ((low, high), (0, width))
        yield ParameterSlice.for_tensor("weight", target, (self.vocab, width), ranges)


class PositionEmbedding(nn.Module):
    """A learned row per position, held whole by every rank (Radford et al. 2019)."""

    def __init__(self, positions: int, width: int, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(positions, width)

    def forward(self, positions: Tensor) -> Tensor:
        """Returns the embeddings [T, width] of positions, int [T]."""
        return ops.embedding(positions, self.weight)

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.for_tensor("weight", self.weight.data)


class LMHead(Linear):
    """The linear layer from hidden states to logits, gathered over ranks.

    Args:
        width: numbers in a hidden state.
        vocab: token ids.
        build: see `Build`.
        tied: the embedding whose weights the head shares, or None.
    """

    def __init__(
        self, width: int, vocab: int, build: Build, tied: VocabEmbedding | None = None
    ) -> None:
        weight = None if tied is None else tied.weight
        outputs = [Output("", vocab, padded=True)]
        super().__init__(width, outputs, build, bias=False, split="outputs", tied=weight)
        self.vocab = vocab

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab] of hidden states [N, width], in their dtype, on every rank."""
        logits: Tensor = self(hidden)
        if self.group.world > 1:
            logits = self.group.all_gather(logits)[:, : self.vocab]
        return logits
