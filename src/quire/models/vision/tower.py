"""Vision towers: transformers that turn the patches of images into embeddings.

    patches -- projection, + learned positions --> layers --> merger --> embeddings
                                                     |
                                                     +-- DeepStack mergers --> further embeddings

Every rank holds a whole tower, in 16 or 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.layers.build import Build
from quire.layers.embedding import PositionEmbedding
from quire.layers.linear import Linear, Output
from quire.layers.parameter_slice import LoadableModel, ParameterSlice
from quire.models.config import family_of, spec_from_config
from quire.models.families.family import Family, VisionHalf
from quire.models.vision.grids import PatchGrid, Segments, TowerInputs, tower_inputs
from quire.models.vision.spec import VisionSpec
from quire.models.weights import load_weights
from quire.ops.images import rotate_heads, segment_attention
from quire.parallel import SingleGroup
from quire.quantization import Unquantized

_NOT_THE_TOWER = re.compile(r"^(?!visual\.)")
"""Matches the tensors of the language model, which loads them itself."""


class PatchProjection(Linear):
    """Maps patches to hidden states. Checkpoints store it as a convolution."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(
            spec.patch_size, spec.hidden_size, build, bias=spec.patch_bias, split="outputs"
        )
        self.kernel = spec.channels, spec.temporal, spec.patch, spec.patch

    def slices(self) -> Iterator[ParameterSlice]:
        for part in super().slices():
            yield self._convolution(part) if len(part.shape) == 2 else part

    def _convolution(self, part: ParameterSlice) -> ParameterSlice:
        def write(rows: Tensor, start: int) -> None:
            part.write(rows.flatten(1), start)

        ranges = (part.ranges[0], *((0, size) for size in self.kernel))
        return replace(part, shape=(part.shape[0], *self.kernel), ranges=ranges, write=write)


class VisionLayer(nn.Module):
    """A layer: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__()
        hidden, width = spec.hidden_size, spec.width
        self.spec = spec
        self.norm1 = spec.norm.layer(hidden, build.within("norm1"))
        self.qkv = Linear(hidden, 3 * hidden, build.within("qkv"), bias=True, split="outputs")
        self.out = Linear(hidden, hidden, build.within("out"), bias=True, split="outputs")
        self.norm2 = spec.norm.layer(hidden, build.within("norm2"))
        gated = spec.act.endswith("_and_mul")
        up = [Output("gate", width), Output("up", width)] if gated else width
        self.up = Linear(hidden, up, build.within("up"), bias=True, split="outputs")
        self.down = Linear(width, hidden, build.within("down"), bias=True, split="outputs")

    def forward(self, x: Tensor, angles: Tensor, segments: Segments) -> Tensor:
        """Returns the next hidden states, [T, hidden_size].

        Args:
            x: [T, hidden_size].
            angles: float32 [T, head_dim], the cosines of all pairs, then their sines.
            segments: the patches that attend to each other.
        """
        spec = self.spec
        qkv = self.qkv(x, norm=self.norm1).view(len(x), 3, spec.heads, spec.head_dim)
        rotate_heads(qkv[:, :2], angles)
        heads = segment_attention(qkv, segments.starts, segments.longest)
        x = self.out(heads.reshape(x.shape), residual=x)
        states: Tensor = self.down(self.up(x, norm=self.norm2, act=spec.act), residual=x)
        return states


class Merger(nn.Module):
    """Turns the states of a square of patches into an embedding.

    Args:
        joined: whether the norm is over the states of the whole square instead of each patch.
    """

    def __init__(self, spec: VisionSpec, build: Build, *, joined: bool) -> None:
        super().__init__()
        self.merged = spec.merged
        self.joined = joined
        width = spec.merged if joined else spec.hidden_size
        self.norm = spec.norm.layer(width, build.within("norm"))
        self.up = Linear(spec.merged, spec.merged, build.within("up"), bias=True, split="outputs")
        self.down = Linear(
            spec.merged, spec.outputs, build.within("down"), bias=True, split="outputs"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns embeddings [T / merge², outputs] of hidden states [T, hidden_size]."""
        x = self.norm(x.view(-1, self.merged) if self.joined else x).view(-1, self.merged)
        return self.down(self.up(x, act="gelu"))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class TowerRun:
    """Images in a tower, between two layers.

    Attributes:
        patches: [T, numbers of a patch], in the order of images.
        inputs: see `tower_inputs`.
        hidden: [T, hidden_size], the states before the next layer.
        angles: float32 [T, head_dim], the rotation of each patch.
        outputs: [T / merge², width], the embeddings, as far as they are computed.
    """

    patches: Tensor
    inputs: TowerInputs
    hidden: Tensor
    angles: Tensor
    outputs: Tensor


class VisionTower(LoadableModel):
    """A vision tower. Weights are uninitialized until `load_weights`.

    Attributes:
        levels: embeddings of a token that are added after the first layers of the language model
            (DeepStack).
        width: numbers of a token's outputs: spec.outputs * (1 + levels).
    """

    spec: VisionSpec
    frequencies: Tensor

    def __init__(self, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        build = Build(SingleGroup(), Unquantized(), device, dtype)
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.levels = len(spec.deepstack)
        self.width = spec.outputs * (1 + self.levels)
        self.patches = PatchProjection(spec, build.within("patches"))
        self.positions: PositionEmbedding | None = None
        if spec.side:
            where = build.within("positions")
            self.positions = PositionEmbedding(spec.side**2, spec.hidden_size, where)
        self.layers = nn.ModuleList(
            VisionLayer(spec, build.within(f"layers.{index}")) for index in range(spec.layers)
        )
        self.merger = Merger(spec, build.within("merger"), joined=False)
        self.deep = nn.ModuleList(
            Merger(spec, build.within(f"deep.{index}"), joined=True) for index in range(self.levels)
        )
        # Half of a head's pairs turn by the row and half by the column, with equal frequencies.
        half = spec.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = (1.0 / spec.theta**exponents).to(device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.spec.layers

    @torch.inference_mode()
    def encode(self, patches: Sequence[Tensor], grids: Sequence[PatchGrid]) -> list[Tensor]:
        """Returns the embeddings of each image, [tokens, width] in `dtype`.

        Args:
            patches: [patches, numbers of a patch] of each image, from `prepare`.
            grids: the grid of each image.
        """
        run = self.open(torch.cat(list(patches)), grids)
        self.run_layers(run, 0, self.depth)
        merged = self.spec.merge**2
        return list(torch.split(run.outputs, [grid.h * grid.w // merged for grid in grids]))

    def open(self, patches: Tensor, grids: Sequence[PatchGrid]) -> TowerRun:
        """Returns a run over images, of which no layer is computed.

        Args:
            patches: [T, numbers of a patch], those of one image after those of the other.
            grids: the grid of each image.
        """
        return self.empty_run(patches.to(self.dtype), tower_inputs(self.spec, grids, self.device))

    def empty_run(self, patches: Tensor, inputs: TowerInputs) -> TowerRun:
        """Returns a run with uninitialized states for T patches."""
        spec, count = self.spec, len(patches)
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        return TowerRun(
            patches,
            inputs,
            hidden=torch.empty(count, spec.hidden_size, **options),
            angles=torch.empty(count, spec.head_dim, device=self.device, dtype=torch.float32),
            outputs=torch.empty(count // spec.merge**2, self.width, **options),
        )

    def run_layers(self, run: TowerRun, first: int, end: int) -> None:
        """Computes the layers from `first` to before `end`.

        The projection of patches belongs to the first layer, and the merger to the last. The
        function neither waits for the device nor decides anything by values on it, so it may be
        captured.
        """
        inputs, spec = run.inputs, self.spec
        if first == 0:
            self._begin(run)
        x = run.hidden
        for index in range(first, end):
            narrow = inputs.windows if index not in spec.full_layers else None
            x = self.layers[index](x, run.angles, narrow or inputs.images)
            if index in spec.deepstack:
                level = spec.deepstack.index(index)
                self._write(run, 1 + level, self.deep[level](x))
        if end == self.depth:
            self._write(run, 0, self.merger(x))
        else:
            run.hidden.copy_(x)

    def _begin(self, run: TowerRun) -> None:
        """Computes the inputs of the first layer."""
        places, order, x = run.inputs.places, run.inputs.order, run.patches
        if order is not None:
            x = x.view(len(order), -1)[order].view_as(x)
        x = self.patches(x)
        if self.positions is not None:
            x = x + self._learned(places).to(x.dtype)
        run.hidden.copy_(x)
        run.angles.copy_(self._angles(places))

    def _write(self, run: TowerRun, level: int, embeddings: Tensor) -> None:
        """Writes a merger's embeddings, [outputs, spec.outputs], in the order of images."""
        size, order = self.spec.outputs, run.inputs.order
        columns = run.outputs[:, level * size : (level + 1) * size]
        if order is None:
            columns.copy_(embeddings)
        else:
            columns.index_copy_(0, order.long(), embeddings)

    def _angles(self, places: Tensor) -> Tensor:
        """Returns the rotation of each patch, float32 [T, head_dim]: cosines, then sines."""
        turns = places[:2, :, None].float() * self.frequencies
        both = torch.cat([turns[0], turns[1]], dim=1)
        return torch.cat([both.cos(), both.sin()], dim=1)

    def _learned(self, places: Tensor) -> Tensor:
        """Returns the learned position of each patch, interpolated, float32 [T, hidden_size]."""
        assert self.positions is not None
        side = self.spec.side
        where = places[:2].float() * (side - 1) / (places[2:] - 1).clamp(min=1)
        low = where.floor()
        share = where - low
        low = low.long()
        high = (low + 1).clamp(max=side - 1)
        total = torch.zeros((), device=places.device)
        for row, across in ((low[0], 1 - share[0]), (high[0], share[0])):
            for column, along in ((low[1], 1 - share[1]), (high[1], share[1])):
                weight = (across * along).unsqueeze(1)
                total = total + self.positions.weight[row * side + column] * weight
        return total

    def workspace_bytes(self, patches: int) -> int:
        """Returns an upper bound of the bytes that `encode` takes for `patches` patches."""
        spec = self.spec
        # In fp32: the patches three times, hidden states before and after a layer with q, k, v and
        # the heads, and the two widths of a gated feed-forward layer with its result.
        numbers = 3 * spec.patch_size + 8 * spec.hidden_size + 3 * spec.width
        # The outputs of all mergers, their concatenation, and the squares within a merger.
        outputs = 3 * self.width + 3 * spec.merged
        return 4 * patches * numbers + 4 * (patches // spec.merge**2) * outputs


def has_tower(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a model with a tower that is supported."""
    return "vision_config" in config and family_of(config).vision is not None


def tower_spec(config: Mapping[str, Any]) -> VisionSpec:
    """Returns the tower that config.json describes.

    Raises:
        ModelError: there is none, or it does not fit the language model.
    """
    half, spec = _half(config).spec(config), spec_from_config(config)
    if half.outputs != spec.hidden_size:
        raise ModelError(
            f"config.json: vision_config: out_hidden_size {half.outputs} differs from hidden_size "
            f"{spec.hidden_size} of the language model"
        )
    if len(half.deepstack) > len(spec.layers):
        raise ModelError(
            f"config.json: vision_config: {len(half.deepstack)} layers in "
            f"deepstack_visual_indexes, but the language model has {len(spec.layers)} layers"
        )
    return half


def load_tower(
    folder: Path,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> VisionTower:
    """Returns the tower of a checkpoint, with its weights.

    Args:
        folder: the checkpoint.
        config: its config.json.
        device: where the tower computes.
        dtype: dtype of the language model's activations.
        load_format: see `load_weights`.
        seed: see `load_weights`.

    Raises:
        ModelError: the model has no supported tower, or a tensor is missing, misshapen or
            quantized.
    """
    half = _half(config)
    tower = VisionTower(tower_spec(config), device, dtype).eval()
    stored = Family(
        name="vision tower",
        spec=spec_from_config,
        source=half.source,  # type: ignore[arg-type]
        prefixes=half.prefixes,
        ignored=_NOT_THE_TOWER,
        head="",
    )
    load_weights(tower, folder, load_format, seed, family=stored)
    return tower


def _half(config: Mapping[str, Any]) -> VisionHalf:
    half = family_of(config).vision if "vision_config" in config else None
    if half is None:
        raise ModelError("config.json describes no vision tower that is supported")
    return half
