"""Attention sinks as parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quire.layers.build import Build
from quire.layers.parameter_slice import ParameterSlice
from quire.sharding import ShardSpec


class Sinks(nn.Module):
    """A score for each of a rank's heads, see `ops.paged_attention`."""

    def __init__(self, heads: int, build: Build) -> None:
        super().__init__()
        self.heads = heads
        self.range = ShardSpec(0).bounds(heads, build.group.rank, build.group.world)
        self.weight = build.empty(self.range[1] - self.range[0])

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.of("weight", self.weight.data, (self.heads,), (self.range,))
