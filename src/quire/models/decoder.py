"""One decoder that runs any `ModelSpec`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.attention import KVLayout
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.residual import Residual
from quire.layers.rope_spec import RopeSpec
from quire.layers.rotary import RotaryTable
from quire.models.spec import LayerSpec, ModelSpec
from quire.plan import KVGroup


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        mixer = replace(spec.mixer, window=model.window(spec.mixer))
        self.attention_norm = model.norm.layer(hidden, build.within("attention_norm"))
        self.attention = mixer.layer(hidden, rotary, build.within("attention"))
        self.mlp_norm = model.norm.layer(hidden, build.within("mlp_norm"))
        self.mlp = spec.ffn.layer(hidden, build.within("mlp"))

    def forward(
        self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: ops.KVLayer
    ) -> Residual:
        x = self.attention(x, self.attention_norm, batch, group, kv)
        return self.mlp(x, self.mlp_norm)  # type: ignore[no-any-return]

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that either part needs for intermediates."""
        mlp: int = self.mlp.workspace_bytes(tokens)
        return max(self.attention.workspace_bytes(tokens), mlp)


class Decoder(nn.Module):
    """Token ids to hidden states to logits. Weights are empty until `load_weights`."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.group = build.group
        self.device = build.device
        self.dtype = build.dtype
        self.embedding = VocabEmbedding(
            spec.vocab_size, spec.hidden_size, build.within("embedding")
        )
        self.positions: PositionEmbedding | None = None
        if spec.learned_positions is not None:
            self.positions = PositionEmbedding(
                spec.learned_positions, spec.hidden_size, build.within("positions")
            )
        ropes = dict.fromkeys(mixer.rope for mixer in spec.attention if mixer.rope is not None)
        tables = {
            rope: RotaryTable(rope, spec.max_positions, device=build.device) for rope in ropes
        }
        self.rotary = nn.ModuleList(tables.values())
        blocks = [
            _block(layer, spec, _table(tables, layer), build.within(f"layers.{index}"))
            for index, layer in enumerate(spec.layers)
        ]
        self.layers = nn.ModuleList(blocks)
        self.norm = spec.norm.layer(spec.hidden_size, build.within("norm"))
        # Published models round it.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=build.dtype).item()
        self.head = LMHead(
            spec.hidden_size,
            spec.vocab_size,
            build.within("head"),
            tied=self.embedding if spec.tied_head else None,
        )
        self._workspace: dict[Any, Any] = {}
        # Layers of one window and layout have their KV booked together.
        keys = [(block.attention.spec.window, block.attention.layout) for block in blocks]
        # Layers that see everything come first.
        self._group_keys = list(dict.fromkeys(sorted(keys, key=lambda key: key[0] is not None)))
        self._layer_groups = [self._group_keys.index(key) for key in keys]
        self._shallow = 1 + max(map(spec.layers.index, set(spec.layers)))

    def kv_groups(
        self, block_size: int, kv_format: ops.KVFormat | None = None
    ) -> tuple[KVGroup, ...]:
        """Returns the groups of layers whose KV is booked together: those of one window and layout,
        those that see everything first. Sizes are those of this rank. kv_format: how KV is stored,
        by default as the model computes it."""
        kv_format = kv_format or ops.KVFormat(self.dtype)
        groups = []
        for index, (window, layout) in enumerate(self._group_keys):
            members = tuple(i for i, group in enumerate(self._layer_groups) if group == index)
            groups.append(
                KVGroup(
                    layers=members,
                    kind="full" if window is None else "window",
                    tokens_per_block=block_size,
                    block_bytes=layout.block_bytes(block_size, kv_format) * len(members),
                    window=window,
                )
            )
        return tuple(groups)

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """The layout of a token's keys and values in each layer of a group, by group."""
        return tuple(layout for _, layout in self._group_keys)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for a step of `tokens`, beside
        weights and cache. Blocks of layers run one after the other and leave a hidden state."""
        # Embeddings, the stream of a layer and the one before, and the normed state, in fp32.
        hidden: int = 4 * tokens * self.spec.hidden_size * 4
        # One block of each kind.
        blocks = dict(zip(self.spec.layers, self.layers, strict=True)).values()
        widest: int = max(cast(Block, block).workspace_bytes(tokens) for block in blocks)
        return hidden + widest

    def forward(
        self, batch: ForwardBatch, kv: Sequence[ops.KVLayer], *, shallow: bool = False
    ) -> Tensor:
        """Computes the batch's tokens and stores their KV.

        kv: per layer. shallow: only the first layers, up to one of each kind, which is enough to
        compile for all.
        Returns the final normed hidden states [T, hidden] in the model's dtype.
        """
        for group_batch, key in zip(batch.groups, self._group_keys, strict=True):
            group_batch.scratch.setdefault("workspace", self._workspace)
            group_batch.scratch["schedule"] = self._schedule(batch, *key, kv[0].format)
        embedded = self.embedding(batch.input_ids)
        if self._embedding_scale != 1.0:
            embedded = embedded.mul_(self._embedding_scale)
        if self.positions is not None:
            embedded = embedded.add_(self.positions(batch.positions))
        x = Residual(embedded)
        depth = self._shallow if shallow else len(self.layers)
        layers = zip(self.layers, kv, self._layer_groups, strict=True)
        for layer, cache, group in itertools.islice(layers, depth):
            x = layer(x, batch, batch.groups[group], cache)
        hidden: Tensor = self.norm(x.total())
        return hidden

    def _schedule(
        self, batch: ForwardBatch, window: int | None, layout: KVLayout, kv_format: ops.KVFormat
    ) -> Any:
        return ops.attention_schedule(
            batch.query_start,
            batch.seq_lens,
            heads=layout.query_heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=self.dtype,
            kv_format=kv_format,
            tokens=len(batch.input_ids),
            max_q_len=batch.max_q_len,
            window=window,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab] of hidden states [N, hidden], in the model's dtype, gathered
        over ranks."""
        logits, cap = self.head.logits(hidden), self.spec.logit_softcap
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def finish(self) -> None:
        """Ends loading."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish()


def _table(tables: dict[RopeSpec, RotaryTable], layer: LayerSpec) -> RotaryTable | None:
    return None if layer.mixer.rope is None else tables[layer.mixer.rope]


def _block(spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build) -> Any:
    if spec.norms == "input" and not spec.parallel and spec.multiplier == 1.0:
        return Block(spec, model, rotary, build)
    # Most models have the plain shape.
    from quire.models.general_block import GeneralBlock

    return GeneralBlock(spec, model, rotary, build)
