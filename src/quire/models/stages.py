"""Pipeline stages: each holds a range of a model's layers on its own devices.

A stage is a `Decoder` with the other stages' parameters on the meta device. These parameters have
names, shapes and layouts, but no memory. So every stage checks the whole checkpoint, and all stages
number KV groups in the same way.
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
from quire.models.encoder import Encoder
from quire.models.spec import ModelSpec
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import KVGroup
from quire.quantization import Quantization, Unquantized

KeepStream = Callable[[int, Tensor], None]
"""Takes a layer's number, from 1, and the residual stream after that layer, [T, hidden_size]."""

_PARAM = "pipeline_parallel_size"
_LAYER_TIME = 1.5
"""Time per byte of a layer's weights in a decode step, relative to the head's. Layers take longer
because they also read KV and launch more kernels. Measured with Qwen3-8B at 64 rows on an H200: 168
µs for a layer's 386 MB, 350 µs for the head's 1,245 MB."""
_MOST_BYTES = 1 + 1 / 16
"""Upper limit for the bytes of the largest stage, relative to the most even split by bytes. Within
this limit, stages are balanced by time. A larger stage would leave less memory for KV."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline. The first also holds the embeddings, the last also the head.

    Attributes:
        index: index of the stage, from 0.
        count: number of stages.
        layers: indices of its layers.
    """

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
    """Connections to the neighbouring stages. All stages run the same steps in one order."""

    def receive(self, hidden: Tensor) -> None:
        """Fills `hidden` with the tensor that the previous stage has sent."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Sends `hidden` to the next stage. The tensor must not change afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageBuild(Build):
    """Settings for building a stage.

    Attributes:
        parts: names of the model's submodules that the stage holds, such as `layers.3` or `head`.
    """

    parts: frozenset[str]

    def within(self, name: str) -> Build:
        build = super().within(name)
        elsewhere = not self.name and name not in self.parts
        return replace(build, device=torch.device("meta")) if elsewhere else build


class StageDecoder(Decoder):
    """A stage of a model.

    The first stage embeds tokens, and the last one returns final hidden states. In between, hidden
    states go from stage to stage.
    """

    def __init__(self, spec: ModelSpec, build: StageBuild, stage: Stage, links: StageLinks) -> None:
        super().__init__(spec, build)
        self.stage = stage
        self.gives_logits = stage.last
        self.own = stage.layers
        specs = [spec.layers[index] for index in stage.layers]
        # A shallow run ends one layer after every kind of layer has occurred, because an all-reduce
        # may be fused with the norm of the next layer.
        self._shallow = 2 + max(map(specs.index, set(specs)))
        self._links = links
        # The residual streams of tapped layers travel with the hidden states. `_streams_in` has the
        # layer numbers of arriving streams, `_streams_out` those of departing streams. `_streams`
        # has the streams by layer number.
        self._streams_in: tuple[int, ...] = ()
        self._streams_out: tuple[int, ...] = ()
        self._streams: dict[int, Tensor] = {}
        self._keep: KeepStream | None = None

    def kv_groups(
        self, block_size: int, kv_format: ops.KVFormat | None = None, first: int = 0
    ) -> tuple[KVGroup, ...]:
        """Returns all KV groups of the model, each with this stage's layers only."""
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

    def decode_front(self, kv: Sequence[Any]) -> None:
        """Returns None, because only the first stage embeds tokens."""

    @property
    def last_norm(self) -> None:
        """None, because `leave` applies the norm, or sends the hidden states."""

    def leave(self, hidden: Tensor) -> Tensor:
        if self.stage.last:
            return super().leave(hidden)
        # A shallow body skips some layers. The hidden states then replace the streams of these
        # layers.
        streams = [self._streams.pop(layer, hidden) for layer in self._streams_out]
        self._links.send(torch.cat([hidden, *streams], dim=1) if streams else hidden)
        return hidden

    def tap(self, layers: Sequence[int], keep: KeepStream) -> None:
        """Sends the residual streams after the given layers to the last stage.

        All stages must call it with the same layers.

        Args:
            layers: layer numbers, from 1.
            keep: called by the last stage with each layer's number and stream, [T, hidden_size].
        """
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
    """Returns one stage of a model with uninitialized weights.

    Args:
        spec: the whole model.
        index: index of the stage, from 0.
        count: number of stages.
        links: connections to the neighbouring stages.
        device: see `build_model`.
        dtype: dtype of activations, by default the checkpoint's.
        group: the ranks that share the stage's layers.
        quantization: chooses weight formats.
        expert_parallel: see `Build`.
        drafts: see `Build`.
        embeds: whether the last stage has the embeddings too, because a draft head needs them.

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
    """Returns the layers of each of `count` stages.

    The split minimizes the slowest stage's time in a decode step. No stage's weights may exceed
    `_MOST_BYTES` times the largest stage of the most even split by bytes.

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


def layer_bytes(model: Decoder | Encoder) -> list[int]:
    """Returns the bytes of each layer's weights.

    The embeddings count for the first layer. The final norm and the head count for the last layer.
    All that an encoder has outside of its layers counts for the first one.
    """
    sizes = [_bytes(layer) for layer in model.layers]
    if isinstance(model, Encoder):
        sizes[0] += _bytes(model) - sum(sizes)
        return sizes
    sizes[0] += _bytes(model.embedding)
    if model.positions is not None:
        sizes[0] += _bytes(model.positions)
    sizes[-1] += _bytes(model.norm) + _bytes(_head(model))
    return sizes


def layer_times(model: Decoder) -> list[float]:
    """Returns each layer's time in a decode step, in units of the time for one byte of the head.

    The head counts for the last layer. The lookup of embeddings takes no time worth counting.
    """
    times = [_LAYER_TIME * _bytes(layer) for layer in model.layers]
    times[-1] += _bytes(_head(model))
    return times


def _head(model: Decoder) -> torch.nn.Module:
    return model.embedding if model.head.tied else model.head


def balanced_ranges(
    costs: Sequence[float], count: int, sizes: Sequence[float] = (), most: float = math.inf
) -> list[range]:
    """Splits items into `count` ranges such that the largest total cost of a range is minimal.

    Args:
        costs: costs of the items, in order; at least `count` of them.
        count: number of ranges. Each gets at least one item.
        sizes: sizes of the items, by default their costs.
        most: upper limit for the total size of a range, kept if that is possible.
    """
    cost_ends = list(itertools.accumulate(costs, initial=0.0))
    size_ends = list(itertools.accumulate(sizes or costs, initial=0.0))

    def cost(start: int, end: int) -> float:
        fits = size_ends[end] - size_ends[start] <= most
        return cost_ends[end] - cost_ends[start] if fits else math.inf

    # Dynamic programming. For each number of leading items: the largest total cost of the best
    # split so far, and the starts of its ranges.
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
