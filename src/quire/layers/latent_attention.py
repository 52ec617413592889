"""Multi-head latent attention (DeepSeek-V2, 2024): the KV cache holds one latent per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from quire.ops import latent as latent_ops
from quire.ops.reference.quantized import dequantize
from quire.parallel.sharding import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Attention whose keys and values are projections of one latent per token.

    Attributes:
        heads: query heads of the whole model.
        rank: numbers in a latent.
        query_rank: numbers in the low-rank vector from which queries are projected, or None if they
            are projected from hidden states.
        key_dim: dimensions of a head's key that are not rotated. All heads share one rotated key of
            `rope.rotary_dim` dimensions.
        value_dim: dimensions of a head's value.
        scale: scores are multiplied by it before the softmax.
        norm: the norm of latents and of the queries' low-rank vectors.
        rope: rotation of the shared key and of queries.
        bias: whether the projections from hidden states and the output projection have biases.
    """

    heads: int
    rank: int
    query_rank: int | None
    key_dim: int
    value_dim: int
    scale: float
    norm: NormSpec
    rope: RopeSpec
    bias: bool = False

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query."""
        return self.key_dim + self.rope.rotary_dim

    @property
    def width(self) -> int:
        """Numbers that the cache holds for each token: the latent and the shared key."""
        return self.rank + self.rope.rotary_dim

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> LatentAttention:
        """Returns the layer, for hidden states of this width."""
        if rotary is None:
            raise ConfigError("latent attention needs rotary positions")
        return LatentAttention(self, hidden, rotary, build)


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """The cache entry of one token, which is the same on every rank.

    Attributes:
        rank: numbers in the latent.
        width: numbers in the latent and the shared key together.
        query_heads: query heads of this rank.
        dtype: dtype of the shared key if latents are stored in 8 bits.
    """

    rank: int
    width: int
    query_heads: int
    dtype: torch.dtype

    @property
    def kind(self) -> Kind:
        return "full"

    @property
    def window(self) -> None:
        return None

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shapes and dtypes of a block's tensors.

        One tensor holds latent and key side by side. In 8 bits, latents and keys have one tensor
        each. If the format has a scale per token, the latents' scales are a third tensor.
        """
        if kv_format.scales == "none":
            return [((1, block_size, self.width), kv_format.dtype)]
        latents = (1, block_size, self.rank), kv_format.dtype
        keys = (1, block_size, self.width - self.rank), self.dtype
        own = [((1, block_size), torch.float32)] if kv_format.scales == "token" else []
        return [latents, keys, *own]

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> ops.KVLayer:
        """Returns one layer's latents in the form that `ops.latent.store_latent` takes."""
        if len(parts) == 1:
            return ops.KVLayer(parts[0], parts[0])
        scales = head_scales[0] if len(parts) == 2 and head_scales is not None else parts[-1]
        return ops.KVLayer(parts[0], parts[1], scales)

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> Any:
        return latent_ops.latent_schedule(
            batch.query_start,
            batch.seq_lens,
            heads=self.query_heads,
            rank=self.rank,
            width=self.width,
            dtype=dtype,
            tokens=len(batch.input_ids),
            max_q_len=batch.max_q_len,
            even=batch.even,
        )

    def most_skew(
        self, seq_lens: Tensor, dtype: torch.dtype, kv_format: ops.KVFormat
    ) -> float | None:
        return latent_ops.latent_most_skew(seq_lens, self.query_heads)


class LatentAttention(nn.Module):
    """Multi-head latent attention.

    The projection of keys is absorbed into queries, in prefill and in decode
    (`ops/reference/latent.py`). Each rank computes its share of the heads and caches all latents.
    """

    def __init__(
        self, spec: LatentAttentionSpec, hidden: int, rotary: RotaryTable, build: Build
    ) -> None:
        super().__init__()
        world = build.group.world
        if spec.heads % world:
            raise ConfigError(
                f"{spec.heads} attention heads cannot be split over {world} ranks",
                "tensor_parallel_size",
            )
        self.spec = spec
        # A list hides the table from the module tree, because all layers share one table.
        self._rotary = [rotary]
        queries = Output("q", spec.heads * spec.query_dim, spec.query_dim)
        # A unit as large as the output cannot be split, so every rank computes all latents.
        latents = Output("kv_a", spec.width, spec.width)
        self.q_b: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if spec.query_rank is not None:
            self.q_norm = spec.norm.layer(spec.query_rank, build.within("q_norm"))
            own = [Output("", queries.size, queries.unit)]
            self.q_b = Linear(
                spec.query_rank, own, build.within("q_b"), bias=False, split="outputs"
            )
            queries = Output("q_a", spec.query_rank, spec.query_rank)
        self.inputs = Linear(
            hidden, [queries, latents], build.within("inputs"), bias=spec.bias, split="outputs"
        )
        self.kv_norm = spec.norm.layer(spec.rank, build.within("kv_norm"))
        self.kv_b = LatentProjection(spec, build.within("kv_b"))
        self.out = Linear(
            spec.heads * spec.value_dim, hidden, build.within("out"), bias=spec.bias,
            split="inputs", unit=spec.value_dim,
        )  # fmt: skip
        self.layout = LatentLayout(spec.rank, spec.width, spec.heads // world, build.dtype)

    def forward(
        self,
        x: Residual,
        norm: RMSNorm | None,
        batch: ForwardBatch,
        group: GroupBatch,
        kv: ops.KVLayer,
    ) -> Residual:
        """Returns x + attention(norm(x)), [T, hidden]."""
        spec = self.spec
        inputs: Tensor = self.inputs(x.total(), norm=norm)
        q, latent = torch.split(inputs, self.inputs.sizes, dim=1)
        if self.q_b is not None:
            q = self.q_b(q, norm=self.q_norm)
        turns: dict[str, Any] = {
            "positions": batch.positions,
            "cos_sin": self._rotary[0].cos_sin,
            "interleaved": spec.rope.interleaved,
            "scratch": group.scratch,
        }
        latent_ops.store_latent(
            latent,
            kv,
            norm=ops.RmsScale(self.kv_norm.weight, self.kv_norm.eps),
            slots=group.slots,
            **turns,
        )
        keys, values = torch.split(self.kv_b.weight, [spec.key_dim, spec.value_dim], dim=1)
        heads = q.view(len(q), -1, spec.query_dim)
        attended = latent_ops.latent_attention(
            latent_ops.latent_queries(heads, keys, **turns),
            kv,
            batch.query_start,
            batch.seq_lens,
            group.block_table,
            rank=spec.rank,
            q_lens=batch.q_lens,
            max_q_len=batch.max_q_len,
            max_seq_len=batch.max_seq_len,
            scale=spec.scale,
            scratch=group.scratch,
        )
        return self.out.add(latent_ops.latent_values(attended, values), x)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        spec, heads = self.spec, self.layout.query_heads
        # Queries before and after their projection to latents, attended latents, and values, in
        # fp32 at most.
        each = spec.query_dim + spec.width + spec.rank + spec.value_dim
        q_b = 0 if self.q_b is None else self.q_b.workspace_bytes(tokens)
        linear = self.inputs.workspace_bytes(tokens) + q_b + self.out.workspace_bytes(tokens)
        return 4 * tokens * heads * each + linear


class LatentProjection(nn.Module):
    """The projection from latents to keys and values of this rank's heads.

    Its weight is [heads, key_dim + value_dim, rank], always in floats. The part for keys multiplies
    queries, and the part for values multiplies the attended latents. If the checkpoint's weight is
    quantized, it is dequantized after loading.

    Attributes:
        updates_whole: whether the checkpoint's weight is quantized; see `Linear`.
    """

    def __init__(self, spec: LatentAttentionSpec, build: Build) -> None:
        super().__init__()
        each = spec.key_dim + spec.value_dim
        self.shape = spec.heads * each, spec.rank
        self.range = ShardSpec(0, each).bounds(self.shape[0], build.group.rank, build.group.world)
        self.weight = build.empty((self.range[1] - self.range[0]) // each, each, spec.rank)
        self.build = build
        self.each = each
        scheme = build.quantization.scheme_for(build.name, build.dtype)
        self.updates_whole = scheme.format.scales is not None
        # A list hides the layer from the module tree. The layer is dropped after loading.
        self._stored: list[Linear] = []

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the checkpoint's tensors."""
        if self.updates_whole:
            output = Output("", self.shape[0], self.each)
            layer = Linear(self.shape[1], [output], self.build, bias=False, split="outputs")
            for part in layer.slices():
                yield replace(part, write=self._writer(layer, part.write))
        else:
            target = self.weight.data.flatten(0, 1)
            ranges = self.range, (0, self.shape[1])
            yield ParameterSlice.for_tensor("weight", target, self.shape, ranges)

    def _writer(
        self, layer: Linear, write: Callable[[Tensor, int], None]
    ) -> Callable[[Tensor, int], None]:
        """Returns a function that writes to `layer`, and keeps it until `finish`."""

        def keep(part: Tensor, start: int) -> None:
            self._stored = [layer]
            write(part, start)

        return keep

    def finish(self) -> None:
        """Ends loading. Dequantizes the weight if the checkpoint's is quantized."""
        for layer in self._stored:
            self.weight.data.copy_(dequantize(layer.weight, self.weight.dtype).view_as(self.weight))
        self._stored = []
