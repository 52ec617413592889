"""Models in stages: ranges of layers, each on devices of its own.

A stage is a `Decoder` in which all that other stages hold is on the meta device: names, shapes and
layouts are there, memory is not. So checkpoints are read as strictly as by one rank, and KV groups
are numbered alike in all stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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

_PARAM = "pipeline_parallel_size"


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
        self._shallow = 1 + max(map(specs.index, set(specs)))
        self._links = links

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
        shape = len(batch.input_ids), self.spec.hidden_size
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._links.receive(hidden)
        return hidden

    def leave(self, hidden: Tensor) -> Tensor:
        if self.stage.last:
            return super().leave(hidden)
        self._links.send(hidden)
        return hidden


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
) -> StageDecoder:
    """Returns stage `index` of `count`; the rest as `build_model`.

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
        parts |= {"norm", "head"} | ({"embedding"} if tied else set())
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
    """Returns the layers of each of `count` stages, such that the largest has as few bytes of
    weights as can be.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if count > len(spec.layers):
        raise ConfigError(f"{_PARAM}={count}: the model has {len(spec.layers)} layers", _PARAM)
    build = Build(SingleGroup(), quantization, torch.device("meta"), dtype or spec.dtype)
    return balanced_ranges(layer_bytes(Decoder(spec, build)), count)


def layer_bytes(model: Decoder) -> list[int]:
    """Returns the bytes of each layer's weights, with those of what stands before the first and
    behind the last."""
    sizes = [_bytes(layer) for layer in model.layers]
    sizes[0] += _bytes(model.embedding)
    if model.positions is not None:
        sizes[0] += _bytes(model.positions)
    head = model.embedding if model.head.tied else model.head
    sizes[-1] += _bytes(model.norm) + _bytes(head)
    return sizes


def balanced_ranges(sizes: Sequence[int], count: int) -> list[range]:
    """Returns `count` ranges, none of them empty, that cover all sizes in order, such that the
    largest sum of a range is the least possible. There are at least `count` sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    # For each number of first sizes: the largest sum so far, and where ranges begin.
    best: dict[int, tuple[int, tuple[int, ...]]]
    best = {end: (ends[end], (0,)) for end in range(1, len(ends))}
    for ranges in range(2, count + 1):
        best = {
            end: min(
                (max(best[start][0], ends[end] - ends[start]), (*best[start][1], start))
                for start in range(ranges - 1, end)
            )
            for end in range(ranges, len(ends))
        }
    starts = best[len(sizes)][1]
    return [range(*pair) for pair in itertools.pairwise((*starts, len(sizes)))]


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
