"""Attention sinks as parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from quire.layers.rotary import RopeSpec, RotaryTable
from quire.parallel.sharding import ShardSpec


class Sinks(nn.Module):
    """A score for each of a rank's heads, see `ops.paged_attention`."""

    def __init__(self, heads: int, build: Build) -> None:
        super().__init__()
        self.heads = heads
        self.range = ShardSpec(0).bounds(heads, build.group.rank, build.group.world)
        self.weight = build.empty(self.range[1] - self.range[0])

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.of("weight", self.weight.data, (self.heads,), (self.range,))


# Self-attention over the paged cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Multi-head attention with grouped KV heads.

    qkv_bias, out_bias: whether those projections have biases.
    qk_norm: the RMSNorm that heads of q and k go through, or None.
    window: how many positions a token sees, itself included; None: all of them.
    rope: how heads are rotated, or None.
    sinks: whether each head has a score of its own in the softmax.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: NormSpec | None = None
    window: int | None = None
    rope: RopeSpec | None = None
    softcap: float | None = None
    sinks: bool = False

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return Attention(self, hidden, rotary, build)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Describes what a layer stores of each token on this rank: keys and values of `kv_heads` heads
    of `head_dim`. query_heads: those that read it. window: in tokens, or None."""

    kv_heads: int
    head_dim: int
    query_heads: int
    window: int | None = None

    @property
    def kind(self) -> Kind:
        return "full" if self.window is None else "window"

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns values, and their scales where each token has its own."""
        scales = (2, self.kv_heads, block_size)
        values = ((*scales, self.head_dim), kv_format.dtype)
        return [values, (scales, torch.float32)] if kv_format.scales == "token" else [values]

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> ops.KVLayer:
        """Returns one layer's keys and values."""
        values = parts[0]
        scales = head_scales if len(parts) == 1 else parts[1].unbind(1)
        own = (None, None) if scales is None else (scales[0], scales[1])
        return ops.KVLayer(values[:, 0], values[:, 1], *own)

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> Any:
        """Returns how attention's work on a step's rows is shared out."""
        return ops.attention_schedule(
            batch.query_start,
            batch.seq_lens,
            heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            kv_format=kv_format,
            tokens=len(batch.input_ids),
            max_q_len=batch.max_q_len,
            window=self.window,
        )


class Attention(nn.Module):
    """Multi-head attention with grouped KV heads (Ainslie et al. 2023); heads are shared out over
    ranks, and where there are fewer KV heads than ranks, neighbouring ranks hold copies."""

    def __init__(
        self, spec: AttentionSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        if spec.heads % build.group.world:
            raise ConfigError(
                f"{spec.heads} attention heads cannot be shared out over {build.group.world} ranks",
                "tensor_parallel_size",
            )
        self.spec = spec
        dim = spec.head_dim
        # A list hides the shared table from the module tree: every layer holds the same one.
        self._rotary = [rotary]
        outputs = self.outputs(spec)
        self.qkv = Linear(hidden, outputs, build.within("qkv"), bias=spec.qkv_bias, split="outputs")
        self.out = Linear(
            spec.heads * dim,
            hidden,
            build.within("out"),
            bias=spec.out_bias,
            split="inputs",
            unit=dim,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm is not None:
            self.q_norm = spec.qk_norm.layer(dim, build.within("q_norm"))
            self.k_norm = spec.qk_norm.layer(dim, build.within("k_norm"))
        self.sinks: Any = None
        if spec.sinks:
            self.sinks = Sinks(spec.heads, build.within("sinks"))
        query, kv = (size // dim for size in self.qkv.sizes[:2])
        self.layout = KVLayout(kv, dim, query, spec.window)

    def outputs(self, spec: AttentionSpec) -> list[Output]:
        """Returns what the first projection gives."""
        dim = spec.head_dim
        kv_size = spec.kv_heads * dim
        return [
            Output("q", spec.heads * dim, dim),
            Output("k", kv_size, dim),
            Output("v", kv_size, dim),
        ]

    def forward(
        self,
        x: Residual,
        norm: RMSNorm | None,
        batch: ForwardBatch,
        group: GroupBatch,
        kv: ops.KVLayer,
    ) -> Residual:
        """Returns x + attention(norm(x)), [T, hidden]."""
        return self.out.add(self.attend(self.project(x, norm, batch), batch, group, kv), x)

    def attend(
        self, qkv: Tensor, batch: ForwardBatch, group: GroupBatch, kv: ops.KVLayer
    ) -> Tensor:
        """Returns the outputs of this rank's heads side by side, [T, heads * head_dim]. qkv: what
        `project` gives, any stride between tokens."""
        spec = self.spec
        tokens = len(qkv)
        rotary = self._rotary[0]
        q = ops.qk_norm_rope_store(
            qkv.view(tokens, -1, spec.head_dim),
            kv,
            positions=batch.positions,
            slots=group.slots,
            cos_sin=None if rotary is None else rotary.cos_sin,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if spec.qk_norm is None else spec.qk_norm.eps,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            scratch=group.scratch,
        )
        out = ops.paged_attention(
            q,
            kv,
            batch.query_start,
            batch.seq_lens,
            group.block_table,
            q_lens=batch.q_lens,
            max_q_len=batch.max_q_len,
            max_seq_len=batch.max_seq_len,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=None if self.sinks is None else self.sinks.weight,
            scratch=group.scratch,
        )
        return out.reshape(tokens, -1)

    def project(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Tensor:
        """Returns q, k and v of the heads of this rank, side by side."""
        hidden, norm = x.layer_input(norm)
        return self.qkv(hidden, norm=norm)  # type: ignore[no-any-return]

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        # Queries after rotation and what attention returns are each as wide as q, in fp32 at most.
        heads = 2 * tokens * self.qkv.sizes[0] * 4
        return heads + self.qkv.workspace_bytes(tokens) + self.out.workspace_bytes(tokens)
