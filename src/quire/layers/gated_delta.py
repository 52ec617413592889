"""Gated delta nets (Yang et al. 2024): linear attention with a recurrent state of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.layout import Kind
from quire.layers.linear import Linear, Output
from quire.layers.norm import NormSpec, RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.ops import gated_delta as delta_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net.

    Attributes:
        key_heads: heads of q and k. Each serves value_heads / key_heads value heads.
        value_heads: heads of v, z, a and b.
        key_dim: numbers in a head's q and k.
        value_dim: numbers in a head's v and z.
        taps: width of the short convolution before the net, in tokens.
        norm_eps: epsilon of the gated RMSNorm on the output.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> GatedDelta:
        """Returns the layer, for hidden states of this width."""
        return GatedDelta(self, hidden, build)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A lane's recurrent state on this rank.

    It holds one fp32 matrix per value head and the last inputs of the convolution.

    Attributes:
        value_heads: value heads of this rank.
        key_dim: rows of a head's matrix.
        value_dim: columns of a head's matrix.
        channels: channels of the convolution on this rank: q, k and v.
        taps: width of the convolution, in tokens.
        dtype: dtype of the convolution's inputs.
        drafts: most draft tokens in a row. The next step may continue after any of them
            (`ops/state.py`), so the state keeps what it needs to go back.
    """

    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int
    dtype: torch.dtype
    drafts: int = 0

    @property
    def kind(self) -> Kind:
        return "state"

    @property
    def window(self) -> None:
        return None

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        states: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((self.value_heads, self.key_dim, self.value_dim), torch.float32),
            ((self.taps - 1 + self.drafts, self.channels), self.dtype),
        ]
        if not self.drafts:
            return states
        return [
            *states,
            ((2, self.drafts, self.channels), self.dtype),
            ((2, self.drafts, 2 * self.value_heads), self.dtype),
            ((self.channels + self.value_heads * self.value_dim,), torch.int32),
        ]

    @property
    def head_sections(self) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the split of each of `parts` over ranks: (dimension of heads, section sizes).

        The sections are parts of that dimension. Ranks split each section by heads.
        """
        values = self.value_heads * self.value_dim
        keys = (self.channels - values) // 2
        found: list[tuple[int, tuple[int, ...]]] = [(0, (1,)), (1, (keys, keys, values))]
        if not self.drafts:
            return found
        return [*found, (2, (keys, keys, values)), (2, (1, 1)), (0, (keys, keys, values, values))]

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> delta_ops.StateLayer:
        return delta_ops.StateLayer(*parts)

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> None:
        return None

    def most_skew(self, seq_lens: Tensor, dtype: torch.dtype, kv_format: ops.KVFormat) -> None:
        return None


class GatedDelta(nn.Module):
    """A gated delta net. Each rank computes its share of the heads."""

    def __init__(self, spec: GatedDeltaSpec, hidden: int, build: Build) -> None:
        super().__init__()
        world = build.group.world
        if spec.key_heads % world:
            raise ConfigError(
                f"{spec.key_heads} key heads of gated delta layers cannot be split over "
                f"{world} ranks",
                "tensor_parallel_size",
            )
        self.spec = spec
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        serves = spec.value_heads // spec.key_heads
        outputs = [
            Output("q", keys, spec.key_dim),
            Output("k", keys, spec.key_dim),
            Output("v", values, spec.value_dim * serves),
            Output("z", values, spec.value_dim * serves),
            Output("b", spec.value_heads, serves),
            Output("a", spec.value_heads, serves),
        ]
        self.inputs = Linear(hidden, outputs, build.within("inputs"), bias=False, split="outputs")
        self.out = Linear(
            values, hidden, build.within("out"), bias=False, split="inputs",
            unit=spec.value_dim * serves,
        )  # fmt: skip
        self.norm = NormSpec(kind="rms", eps=spec.norm_eps).layer(
            spec.value_dim, build.within("norm")
        )
        self._rank, self._world = build.group.rank, world
        self._channels = sum(self.inputs.sizes[:3])
        wide = replace(build, dtype=torch.float32)
        self.conv = wide.empty(self._channels, spec.taps)
        self.a_log = wide.empty(spec.value_heads // world)
        self.dt_bias = wide.empty(spec.value_heads // world)
        self.layout = StateLayout(
            spec.value_heads // world,
            spec.key_dim,
            spec.value_dim,
            self._channels,
            spec.taps,
            build.dtype,
            build.drafts,
        )

    def forward(
        self,
        x: Residual,
        norm: RMSNorm | None,
        batch: ForwardBatch,
        group: GroupBatch,
        kv: delta_ops.StateLayer,
    ) -> Residual:
        """Returns x + delta(norm(x)), [T, hidden]."""
        rows = delta_ops.StateRows(
            batch.input_ids,
            group.slots,
            batch.query_start,
            batch.seq_lens,
            group.block_table,
            batch.q_lens,
            batch.max_q_len,
            group.scratch.get("flags"),
        )
        sizes = self.inputs.sizes
        inputs: Tensor = self.inputs(x.total(), norm=norm)
        qkv, z, b, a = torch.split(inputs, [self._channels, *sizes[3:]], dim=1)
        mixed = delta_ops.short_conv(qkv, self.conv, kv, rows)
        out = delta_ops.gated_delta(mixed, a, b, self.a_log, self.dt_bias, kv, rows)
        gated = delta_ops.gated_rms_norm(out, z, self.norm.weight, self.norm.eps)
        return self.out.add(gated, x)

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the convolution's weights, `A_log` and `dt_bias`."""
        start = 0
        for output, size in zip(self.inputs.outputs[:3], self.inputs.sizes[:3], strict=True):
            first = size * self._rank
            target = self.conv.data[start : start + size].unsqueeze(1)
            shape = (output.size, 1, self.spec.taps)
            ranges = ((first, first + size), (0, 1), (0, self.spec.taps))
            yield ParameterSlice.for_tensor(f"conv.{output.name}.weight", target, shape, ranges)
            start += size
        heads = self.spec.value_heads // self._world
        own = ((heads * self._rank, heads * (self._rank + 1)),)
        for name, parameter in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            yield ParameterSlice.for_tensor(name, parameter.data, (self.spec.value_heads,), own)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        spec, size = self.spec, self.conv.element_size()
        heads = spec.value_heads // self._world
        # Outputs of the convolution, the delta rule and its norm. Then, for each chunk of 64 tokens
        # and each head, two matrices and six fp32 vectors.
        rows = tokens * (self._channels + 2 * heads * spec.value_dim) * size
        chunks = (tokens + 64 * 256) * heads * (2 * 64 * size + 6 * 4)
        own: int = self.inputs.workspace_bytes(tokens) + self.out.workspace_bytes(tokens)
        return own + rows + chunks
