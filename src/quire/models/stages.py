"""Models in stages: ranges of layers, each on devices of its own.

A stage is a `Decoder` in which all that other stages hold is on the meta device: names, shapes and
layouts are there, memory is not. So checkpoints are read as strictly as by one rank, and KV groups
are numbered alike in all stages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from quire import ops
from quire.errors import ConfigError
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import KVGroup
from quire.quantization import Quantization, Unquantized

KeepStream = Callable[[int, Tensor], None]
"""Takes the stream behind a layer, whose number from 1 comes first."""

_PARAM = "pipeline_parallel_size"
_LAYER_TIME = 1.5
"""Time of a byte of a layer's weights in a step, over that of a byte of the head's: KV is read
beside them, and there are more launches. Qwen3-8B at 64 rows on an H200: 168 µs for 386 MB, and
350 µs for the head's 1,245 MB."""
_MOST_BYTES = 1 + 1 / 16
"""Bytes of the largest stage, at most, over the least possible, for stages that take as long as
each other: what is left beside the weights is for KV."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages. layers: those that it computes. The first stage holds the embeddings
    as well, the last one the head."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


class StageLinks(Protocol):
    """Passes hidden states on. All stages run the same steps in the same order."""

    def receive(self, hidden: Tensor) -> None:
        """Fills `hidden` with what the stage before has sent."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Sends to the stage behind. What is sent must not change any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageBuild(Build):
    """Builds a stage. parts: the names of the model's parts that it holds."""

    parts: frozenset[str]

    def within(self, name: str) -> Build:
        build = super().within(name)
        elsewhere = not self.name and name not in self.parts
        return replace(build, device=torch.device("meta")) if elsewhere else build


class StageDecoder(Decoder):
    """A stage of a model. The first embeds tokens, the last one gives final hidden states; others
    take hidden states from the stage before, and give them to the next one."""

    def __init__(self, spec: ModelSpec, build: StageBuild, stage: Stage, links: StageLinks) -> None:
        super().__init__(spec, build)
        self.stage = stage
        self.gives_logits = stage.last
        self.own = stage.layers
        specs = [spec.layers[index] for index in stage.layers]
        # One more: a sum over ranks may take in the norm of the layer behind.
        self._shallow = 2 + max(map(specs.index, set(specs)))
        self._links = links
        # Streams of other stages that come along with the hidden states, and those of this one
        # that go on with them, by the number of the layer behind which they are.
        self._streams_in: tuple[int, ...] = ()
        self._streams_out: tuple[int, ...] = ()
        self._streams: dict[int, Tensor] = {}
        self._keep: KeepStream | None = None

    def kv_groups(
        self, block_size: int, kv_format: ops.KVFormat | None = None, first: int = 0
    ) -> tuple[KVGroup, ...]:
        """Returns all groups of the model, with the layers of this stage alone."""
        groups = []
        for group in super().kv_groups(block_size, kv_format, first):
            own = tuple(layer for layer in group.layers if layer - first in self.own)
            size = group.block_bytes // len(group.layers) * len(own)
            groups.append(msgspec.structs.replace(group, layers=own, block_bytes=size))
        return tuple(groups)

    def enter(self, batch: ForwardBatch) -> Tensor:
        if self.stage.first:
            return super().enter(batch)
        width = self.spec.hidden_size
        shape = len(batch.input_ids), width * (1 + len(self._streams_in))
        received = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._links.receive(received)
        if not self._streams_in:
            return received
        hidden, *streams = torch.split(received, width, dim=1)
        for layer, stream in zip(self._streams_in, streams, strict=True):
            self._pass_stream(layer, stream)
        return hidden.contiguous()

    def leave(self, hidden: Tensor) -> Tensor:
        if self.stage.last:
            return super().leave(hidden)
        # Shallow bodies do not come by every layer.
        streams = [self._streams.pop(layer, hidden) for layer in self._streams_out]
        self._links.send(torch.cat([hidden, *streams], dim=1) if streams else hidden)
        return hidden

    def tap(self, layers: Sequence[int], keep: KeepStream) -> None:
        """Has the last stage get the streams behind layers, whose stages pass them on: `keep` gets
        each, [T, hidden]. layers: numbers from 1. All stages must be told the same."""
        wanted = sorted(set(layers))
        self._streams_in = tuple(layer for layer in wanted if layer <= self.own.start)
        self._streams_out = tuple(layer for layer in wanted if layer <= self.own.stop)
        self._keep = keep if self.stage.last else None
        for layer in self._streams_out[len(self._streams_in) :]:
            self.layers[layer - 1].register_forward_hook(
                functools.partial(self._after_layer, layer)
            )

    def _after_layer(self, layer: int, module: Any, inputs: Any, given: Any) -> None:
        self._pass_stream(layer, given if isinstance(given, Tensor) else given.total())

    def _pass_stream(self, layer: int, stream: Tensor) -> None:
        if self._keep is None:
            self._streams[layer] = stream
        else:
            self._keep(layer, stream)


def build_stage(
    spec: ModelSpec,
    index: int,
    count: int,
    links: StageLinks,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    quantization: Quantization | None = None,
    expert_parallel: bool = False,
    drafts: int = 0,
    embeds: bool = False,
) -> StageDecoder:
    """Returns stage `index` of `count`; the rest as `build_model`. embeds: whether the last stage
    has the embeddings as well, for what drafts there.

    Raises:
        ConfigError: there are more stages than layers.
    """
    quantization = quantization or Unquantized()
    stage = Stage(index, count, stage_layers(spec, count, quantization, dtype)[index])
    parts = {f"layers.{layer}" for layer in stage.layers}
    if stage.first:
        parts |= {"embedding", "positions"}
    if stage.last:
        tied = spec.tied_head and not quantization.own_head
        parts |= {"norm", "head"} | ({"embedding"} if tied or embeds else set())
    build = StageBuild(
        group=group or SingleGroup(),
        quantization=quantization,
        device=torch.device(device),
        dtype=dtype or spec.dtype,
        expert_parallel=expert_parallel,
        drafts=drafts,
        parts=frozenset(parts),
    )
    model = StageDecoder(spec, build, stage, links)
    model.eval()
    return model


def stage_layers(
    spec: ModelSpec, count: int, quantization: Quantization, dtype: torch.dtype | None = None
) -> list[range]:
    """Returns the layers of each of `count` stages, such that the slowest takes as little time in a
    decode step as can be, while none has many more bytes of weights than the largest must have.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if count > len(spec.layers):
        raise ConfigError(f"{_PARAM}={count}: the model has {len(spec.layers)} layers", _PARAM)
    build = Build(SingleGroup(), quantization, torch.device("meta"), dtype or spec.dtype)
    model = Decoder(spec, build)
    sizes = layer_bytes(model)
    most = _MOST_BYTES * max(sum(sizes[i] for i in own) for own in balanced_ranges(sizes, count))
    return balanced_ranges(layer_times(model), count, sizes, most)


def layer_bytes(model: Decoder) -> list[int]:
    """Returns the bytes of each layer's weights, with those of what stands before the first and
    behind the last."""
    sizes = [_bytes(layer) for layer in model.layers]
    sizes[0] += _bytes(model.embedding)
    if model.positions is not None:
        sizes[0] += _bytes(model.positions)
    sizes[-1] += _bytes(model.norm) + _bytes(_head(model))
    return sizes


def layer_times(model: Decoder) -> list[float]:
    """Returns how long each layer takes in a decode step, in bytes of the head, which is behind the
    last: embeddings are looked up, which takes no time."""
    times = [_LAYER_TIME * _bytes(layer) for layer in model.layers]
    times[-1] += _bytes(_head(model))
    return times


def _head(model: Decoder) -> torch.nn.Module:
    return model.embedding if model.head.tied else model.head


def balanced_ranges(
    costs: Sequence[float], count: int, sizes: Sequence[float] = (), most: float = math.inf
) -> list[range]:
    """Returns `count` ranges, none of them empty, that cover all costs in order, such that the
    largest sum of a range is the least possible. There are at least `count` costs.

    sizes, most: of ranges whose sizes sum to more than `most` there are none, if that can be.
    """
    cost_ends = list(itertools.accumulate(costs, initial=0.0))
    size_ends = list(itertools.accumulate(sizes or costs, initial=0.0))

    def cost(start: int, end: int) -> float:
        fits = size_ends[end] - size_ends[start] <= most
        return cost_ends[end] - cost_ends[start] if fits else math.inf

    # For each number of first costs: the largest sum so far, and where ranges begin.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {end: (cost(0, end), (0,)) for end in range(1, len(cost_ends))}
    for ranges in range(2, count + 1):
        best = {
            end: min(
                (max(best[start][0], cost(start, end)), (*best[start][1], start))
                for start in range(ranges - 1, end)
            )
            for end in range(ranges, len(cost_ends))
        }
    starts = best[len(costs)][1]
    return [range(*pair) for pair in itertools.pairwise((*starts, len(costs)))]


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
