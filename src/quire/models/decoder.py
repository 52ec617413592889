"""One decoder that runs any `ModelSpec`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.embedding import PositionEmbedding, VocabEmbedding
from quire.layers.mlp import Mlp
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryTable
from quire.models.spec import ModelSpec
from quire.parallel import ProcessGroup
from quire.plan import KVGroup
from quire.quantization import LinearMethod
from quire.sharding import ShardSpec


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        spec: ModelSpec,
        window: int | None,
        rotary: RotaryTable | None,
        *,
        group: ProcessGroup,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        attention, mlp = spec.attention, spec.mlp
        self.attention_norm = _norm(spec, device, dtype)
        self.attention = Attention(
            spec.hidden_size,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            qkv_bias=attention.qkv_bias,
            out_bias=attention.out_bias,
            qk_norm_eps=spec.norm.eps if attention.qk_norm else None,
            scale=attention.scale,
            window=window,
            softcap=attention.softcap,
            rotary=rotary,
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = _norm(spec, device, dtype)
        self.mlp = Mlp(
            spec.hidden_size,
            mlp.width,
            act=mlp.act,
            bias=mlp.bias,
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, batch: ForwardBatch, group: GroupBatch, kv: ops.KVLayer) -> Tensor:
        x = self.attention(x, self.attention_norm, batch, group, kv)
        return self.mlp(x, self.mlp_norm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids to hidden states to logits. Weights are empty until `load_weights`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        group: ProcessGroup,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        self.device = device
        self.dtype = dtype
        self.embedding = VocabEmbedding(
            spec.vocab_size, spec.hidden_size, group=group, device=device, dtype=dtype
        )
        self.positions: PositionEmbedding | None = None
        if spec.learned_positions is not None:
            self.positions = PositionEmbedding(
                spec.learned_positions, spec.hidden_size, device=device, dtype=dtype
            )
        self.rotary: RotaryTable | None = None
        if spec.rope is not None:
            self.rotary = RotaryTable(spec.rope, spec.max_positions, device=device)
        windows = effective_windows(spec)
        self.layers = nn.ModuleList(
            Block(
                spec,
                window,
                self.rotary,
                group=group,
                method=method,
                device=device,
                dtype=dtype,
            )
            for window in windows
        )
        self.norm = _norm(spec, device, dtype)
        self.head: VocabEmbedding | None = None
        if not spec.tied_head:
            self.head = VocabEmbedding(
                spec.vocab_size, spec.hidden_size, group=group, device=device, dtype=dtype
            )
        self._workspace: dict[Any, Any] = {}
        self._group_windows = list(dict.fromkeys(sorted(windows, key=lambda w: w is not None)))
        self._layer_groups = [self._group_windows.index(window) for window in windows]
        self._shallow = 1 + max(windows.index(window) for window in self._group_windows)

    def kv_groups(self, block_size: int, form: ops.KVFormat | None = None) -> tuple[KVGroup, ...]:
        """Layers whose KV is booked together: those that see everything first, then one group per
        window width. Sizes are those of this rank. form: how KV is stored, by default as the model
        computes it."""
        form = form or ops.KVFormat(self.dtype)
        per_token = form.bytes_per_head(self.spec.attention.head_dim)
        per_layer = 2 * self.local_kv_heads * per_token * block_size
        groups = []
        for index, window in enumerate(self._group_windows):
            members = tuple(i for i, group in enumerate(self._layer_groups) if group == index)
            groups.append(
                KVGroup(
                    layers=members,
                    kind="full" if window is None else "window",
                    tokens_per_block=block_size,
                    block_bytes=per_layer * len(members),
                    window=window,
                )
            )
        return tuple(groups)

    @property
    def local_kv_heads(self) -> int:
        """KV heads of each layer on this rank."""
        heads = self.spec.attention.kv_heads
        low, high = ShardSpec(0).bounds(heads, self.group.rank, self.group.world)
        return high - low

    def forward(
        self, batch: ForwardBatch, kv: Sequence[ops.KVLayer], *, shallow: bool = False
    ) -> Tensor:
        """Computes the batch's tokens and stores their KV.

        kv: per layer. shallow: only the first layers, up to one of each kind, which is enough to
        compile for all.
        Returns the final normed hidden states [T, hidden] in the model's dtype.
        """
        for group_batch, window in zip(batch.groups, self._group_windows, strict=True):
            group_batch.scratch.setdefault("workspace", self._workspace)
            group_batch.scratch["schedule"] = self._schedule(batch, window, kv[0].format)
        x = self.embedding(batch.input_ids)
        if self.positions is not None:
            x = x.add_(self.positions(batch.positions))
        depth = self._shallow if shallow else len(self.layers)
        layers = zip(self.layers, kv, self._layer_groups, strict=True)
        for layer, cache, group in itertools.islice(layers, depth):
            x = layer(x, batch, batch.groups[group], cache)
        hidden: Tensor = self.norm(x)
        return hidden

    def _schedule(self, batch: ForwardBatch, window: int | None, form: ops.KVFormat) -> Any:
        heads, kv_heads = self.spec.attention.heads // self.group.world, self.local_kv_heads
        return ops.attention_schedule(
            batch.query_start,
            batch.seq_lens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.spec.attention.head_dim,
            dtype=self.dtype,
            kv_format=form,
            tokens=len(batch.input_ids),
            max_q_len=batch.max_q_len,
            window=window,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab], gathered over ranks."""
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits in the model's dtype."""
        return (self.head or self.embedding).logits(hidden)


def effective_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """Each layer's window; one that no sequence can exceed is none at all."""
    return tuple(
        None if window is None or window >= spec.max_positions else window
        for window in spec.attention.windows
    )


def _norm(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> RMSNorm:
    kind = RMSNorm if spec.norm.kind == "rms" else LayerNorm
    return kind(spec.hidden_size, spec.norm.eps, device=device, dtype=dtype)
