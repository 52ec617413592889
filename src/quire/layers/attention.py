"""Self-attention over the paged KV cache."""

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
    """Attention sinks: one learned score per head, which takes part in the softmax (gpt-oss).
    `ops.paged_attention` adds them."""

    def __init__(self, heads: int, build: Build) -> None:
        super().__init__()
        self.heads = heads
        self.range = ShardSpec(0).bounds(heads, build.group.rank, build.group.world)
        self.weight = build.empty(self.range[1] - self.range[0])

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.for_tensor("weight", self.weight.data, (self.heads,), (self.range,))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Multi-head attention with grouped KV heads.

    Attributes:
        heads: query heads of the whole model.
        kv_heads: KV heads of the whole model.
        head_dim: numbers in each head's q, k and v.
        scale: scores are multiplied by it before the softmax.
        qkv_bias: whether the projections to q, k and v have biases.
        out_bias: whether the projection of the heads' output has a bias.
        qk_norm: the RMSNorm of each head of q and k, or None.
        window: number of positions that a token sees, itself included, or None for all.
        rope: rotation of q and k, or None.
        softcap: scores become softcap * tanh(score / softcap); None leaves them as they are.
        sinks: whether the layer has `Sinks`.
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
    """The KV that a layer stores for each token on this rank.

    Attributes:
        kv_heads: KV heads of this rank.
        head_dim: numbers in a head's key, and in its value.
        query_heads: query heads of this rank, which read the KV.
        window: tokens that a query sees, or None for all.
    """

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
        """Returns the shapes and dtypes of a block's keys and values, and of their scales if the
        format has one for each token."""
        scales = (2, self.kv_heads, block_size)
        values = ((*scales, self.head_dim), kv_format.dtype)
        return [values, (scales, torch.float32)] if kv_format.scales == "token" else [values]

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> ops.KVLayer:
        """Returns the layer's keys and values, with their scales."""
        values = parts[0]
        scales = head_scales if len(parts) == 1 else parts[1].unbind(1)
        own = (None, None) if scales is None else (scales[0], scales[1])
        return ops.KVLayer(values[:, 0], values[:, 1], *own)

    def attention(self, dtype: torch.dtype, kv_format: ops.KVFormat) -> ops.AttentionHeads:
        """Returns the layer's attention, as far as its schedule depends on it."""
        return ops.AttentionHeads(
            self.query_heads, self.kv_heads, self.head_dim, dtype, kv_format, self.window
        )

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> Any:
        """Returns the assignment of a step's attention work to the device's multiprocessors."""
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
            even=batch.even,
        )

    def most_skew(
        self, seq_lens: Tensor, dtype: torch.dtype, kv_format: ops.KVFormat
    ) -> float | None:
        return ops.most_skew(seq_lens, self.attention(dtype, kv_format))


class Attention(nn.Module):
    """Multi-head attention with grouped KV heads (Ainslie et al. 2023).

    Each rank computes its share of the heads. With fewer KV heads than ranks, neighbouring ranks
    hold copies of one KV head.
    """

    def __init__(
        self, spec: AttentionSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        if spec.heads % build.group.world:
            raise ConfigError(
                f"{spec.heads} attention heads cannot be split over {build.group.world} ranks",
                "tensor_parallel_size",
            )
        self.spec = spec
        dim = spec.head_dim
        # A list hides the table from the module tree, because all layers share one table.
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
        """Returns the outputs of the first projection: q, k and v."""
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
        """Returns the outputs of this rank's heads, [T, heads * head_dim].

        Args:
            qkv: the result of `project`; rows may have any stride.
            batch: the step.
            group: the layer's part of the step.
            kv: the layer's part of the KV cache. The tokens' keys and values are stored there.
        """
        spec = self.spec
        tokens = qkv.shape[0]
        rotary = self._rotary[0]
        cos_sin, positions = None, batch.positions
        if rotary is not None:
            cos_sin, positions = rotary.lookup(batch)
        q = ops.qk_norm_rope_store(
            qkv.view(tokens, -1, spec.head_dim),
            kv,
            positions=positions,
            slots=group.slots,
            cos_sin=cos_sin,
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
        """Returns q, k and v of this rank's heads, [T, (heads + 2 * kv_heads) * head_dim]."""
        hidden, norm = x.layer_input(norm)
        return self.qkv(hidden, norm=norm)  # type: ignore[no-any-return]

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        # The rotated queries and the attention output are each as wide as q, and fp32 at most.
        heads = 2 * tokens * self.qkv.sizes[0] * 4
        return heads + self.qkv.workspace_bytes(tokens) + self.out.workspace_bytes(tokens)
