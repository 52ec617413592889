"""The linear layers of a model that take adapters, by their names in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.models import Decoder
from quire.models.config import family_named
from quire.models.families.family import Source
from quire.ops.adapters import HEAD, WORDS, padded_rank, scale_bits
from quire.parallel.sharding import ShardSpec

_ALIGNED = 16
"""Every A and B begins at a multiple of this many elements, so that kernels read whole lines."""


@dataclass(frozen=True, slots=True)
class Target:
    """A projection of a linear layer, and its part of a checkpoint's module.

    Attributes:
        layer: index of the linear layer.
        place: index of the projection in the layer.
        inputs: number of the whole layer's inputs.
        size: number of the whole projection's outputs.
        low, high: range of the outputs that this rank holds.
        source: the places of the outputs in the module.
    """

    layer: int
    place: int
    inputs: int
    size: int
    low: int
    high: int
    source: Source

    @property
    def outputs(self) -> int:
        """The number of the module's outputs up to the projection's last one."""
        if self.source.every is not None:
            _, size, period = self.source.every
            return self.size // size * period
        return self.size if self.source.span is None else self.source.span[1]

    def rows(self, b: Tensor) -> Tensor:
        """Returns the projection's rows of the module's B."""
        if self.source.every is not None:
            offset, size, period = self.source.every
            blocks = b.reshape(-1, period, b.shape[1])
            return blocks[:, offset : offset + size].flatten(0, 1)
        start, end = self.source.span or (0, self.size)
        return b[start:end]


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's matrices for one projection, to whose weights it adds scale * b a.

    Attributes:
        a: [rank, inputs]. It is whole, not a rank's shard.
        b: [outputs, rank]. It is whole, not a rank's shard.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(slots=True)
class Adapter:
    """An adapter that was read.

    Attributes:
        digest: digest of its contents.
        parts: its matrices, by linear layer and projection.
    """

    digest: str
    parts: dict[tuple[int, int], LowRank] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Image:
    """The content of a slot for an adapter: this rank's share of it.

    Attributes:
        data: [elements], in the model's dtype.
        table: int32 [layers, words], see `SlotWeights`.
    """

    data: Tensor
    table: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.table.nbytes


class AdapterLayout:
    """The linear layers of a model that take adapters with a rank up to `rank`.

    Attributes:
        layers: these layers.
        targets: the projections of each module of a checkpoint, by the module's name without the
            family's prefix.
        elements: number of elements of a slot.
        words: number of words of a row of a slot's table.

    Raises:
        ConfigError: the model has no such layer, or a layer's name is not known.
    """

    def __init__(self, model: Decoder, rank: int) -> None:
        self.rank = rank
        self.dtype = model.dtype
        family = family_named(model.spec.family)
        if family is None:
            raise ConfigError(f"there is no family {model.spec.family!r}", "enable_lora")
        self.canonical = family.canonical
        self.layers: list[Linear] = []
        self.targets: dict[str, list[Target]] = {}
        self._projections: list[list[Target]] = []
        self.elements = 0
        for layer in model.modules():
            if not isinstance(layer, Linear) or layer.name.startswith("head"):
                continue
            index = len(self.layers)
            self.layers.append(layer)
            self._projections.append([])
            self.elements += _aligned(rank * len(layer.outputs) * _inputs(layer))
            for place, output in enumerate(layer.outputs):
                name = f"{layer.name}.{output.name}" if output.name else layer.name
                source = family.source(model.spec, f"{name}.weight")
                shard = ShardSpec(0, output.unit, output.padded)
                if layer.split == "inputs":
                    low, high = 0, output.size
                else:
                    low, high = shard.bounds(output.size, layer.group.rank, layer.group.world)
                target = Target(index, place, layer.inputs, output.size, low, high, source)
                self._projections[index].append(target)
                self.targets.setdefault(source.name.removesuffix(".weight"), []).append(target)
                self.elements += _aligned(layer.sizes[place] * padded_rank(rank))
        if not self.layers:
            raise ConfigError("the model has no linear layer that takes adapters", "enable_lora")
        self.words = HEAD + WORDS * max(len(layer.outputs) for layer in self.layers)

    @property
    def most_bytes(self) -> int:
        """Returns the bytes of the largest adapter that fits, in fp32, over all ranks."""
        widths = sum(t.inputs + t.size for targets in self._projections for t in targets)
        return 4 * widths * self.rank

    def image(self, adapter: Adapter, *, pinned: bool) -> Image:
        """Returns this rank's share of an adapter."""
        table = torch.zeros(len(self.layers), self.words, dtype=torch.int32)
        pieces: list[tuple[int, Tensor]] = []
        end = 0

        def put(piece: Tensor) -> int:
            nonlocal end
            start = end
            pieces.append((start, piece))
            end += _aligned(piece.numel())
            return start

        for index, layer in enumerate(self.layers):
            low, high = layer.columns
            parts = [adapter.parts.get((index, place)) for place in range(len(layer.outputs))]
            rows = [part.a[:, low:high] for part in parts if part is not None]
            if not rows:
                continue
            line, first = [put(torch.cat(rows)), sum(map(len, rows))], 0
            for target, part in zip(self._projections[index], parts, strict=True):
                if part is None:
                    line += [0] * WORDS
                    continue
                rank, own = len(part.a), part.b[target.low : target.high]
                b = torch.zeros(layer.sizes[target.place], padded_rank(rank), dtype=self.dtype)
                b[: len(own), :rank] = own
                line += [put(b), rank, first, scale_bits(part.scale)]
                first += rank
            table[index, : len(line)] = torch.tensor(line, dtype=torch.int32)
        data = torch.zeros(end, dtype=self.dtype, pin_memory=pinned)
        for start, piece in pieces:
            data[start : start + piece.numel()] = piece.reshape(-1)
        return Image(data, table.pin_memory() if pinned else table)


def _inputs(layer: Linear) -> int:
    low, high = layer.columns
    return high - low


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
