"""The decoder, which runs any `ModelSpec`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.async_tp import run_halves
from quire.layers.attention import KVLayout
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.layout import MixerLayout, block_bytes
from quire.layers.parameter_slice import LoadableModel
from quire.layers.residual import Residual
from quire.layers.rotary import RopeSpec, RotaryTable
from quire.models.general_block import general_block
from quire.models.spec import LayerSpec, ModelSpec
from quire.plan import KVGroup


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.attention_norm = model.norm.layer(hidden, build.within("attention_norm"))
        self.attention = model.mixer(spec).layer(hidden, rotary, build.within("attention"))
        self.mlp_norm = model.norm.layer(hidden, build.within("mlp_norm"))
        self.mlp = spec.ffn.layer(hidden, build.within("mlp"))

    def forward(self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: Any) -> Residual:
        x = self.attention(x, self.attention_norm, batch, group, kv)
        return self.mlp(x, self.mlp_norm, batch)  # type: ignore[no-any-return]

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of intermediates, for the larger of both parts."""
        mixer: int = self.attention.workspace_bytes(tokens)
        mlp: int = self.mlp.workspace_bytes(tokens)
        return max(mixer, mlp)


class DecoderLayers(LoadableModel):
    """The layers of a model, and the layout of their KV.

    Attributes:
        own: indices of the layers that this process computes: all layers, except in a pipeline
            stage (`stages.py`).
        gives_logits: whether this process has the head. Only the last stage of a pipeline has it.
    """

    spec: ModelSpec
    gives_logits = True

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.group = build.group
        self.device = build.device
        self.dtype = build.dtype
        ropes = dict.fromkeys(rope for rope in map(_rope, spec.layers) if rope is not None)
        tables: dict[RopeSpec | None, RotaryTable] = {
            rope: RotaryTable(rope, spec.max_positions, device=build.device) for rope in ropes
        }
        self.rotary = nn.ModuleList(tables.values())
        blocks = [
            make_block(layer, spec, tables.get(_rope(layer)), build.within(f"layers.{index}"))
            for index, layer in enumerate(spec.layers)
        ]
        self.layers = nn.ModuleList(blocks)
        self.own = range(len(blocks))
        # A shallow run ends one layer after every kind of layer has occurred, because an all-reduce
        # may be fused with the norm of the next layer.
        self._shallow = 2 + max(map(spec.layers.index, set(spec.layers)))
        self._workspace: dict[Any, Any] = {}
        # Layers with equal layouts form a KV group.
        layouts: list[MixerLayout] = [block.attention.layout for block in blocks]
        # Groups with full attention come first.
        order = "full", "window", "state"
        self.kv_layouts = tuple(
            dict.fromkeys(sorted(layouts, key=lambda layout: order.index(layout.kind)))
        )
        self._layer_groups = [self.kv_layouts.index(layout) for layout in layouts]

    def kv_groups(
        self, block_size: int, kv_format: ops.KVFormat | None = None, first: int = 0
    ) -> tuple[KVGroup, ...]:
        """Returns the KV groups. Layers with equal layouts form one; full attention comes first.

        Args:
            block_size: tokens of a block.
            kv_format: storage format of KV, by default the model's dtype.
            first: index that the KV cache gives to this model's first layer.
        """
        kv_format = kv_format or ops.KVFormat(self.dtype)
        groups = []
        for index, layout in enumerate(self.kv_layouts):
            layers = enumerate(self._layer_groups, first)
            members = tuple(layer for layer, group in layers if group == index)
            groups.append(
                KVGroup(
                    layers=members,
                    kind=layout.kind,
                    tokens_per_block=block_size,
                    block_bytes=block_bytes(layout, block_size, kv_format) * len(members),
                    window=layout.window,
                )
            )
        return tuple(groups)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of intermediates in a step of `tokens` tokens.

        Layers run one after the other, so only the largest one counts.
        """
        # Embeddings, the residual stream before and after a layer, and the normed state, in fp32.
        hidden: int = 4 * tokens * self.spec.hidden_size * 4
        # Equal specs need equal memory, so one block of each kind suffices.
        blocks = dict(zip(self.spec.layers, self.layers, strict=True)).values()
        widest: int = max(cast(Block, block).workspace_bytes(tokens) for block in blocks)
        return hidden + widest

    def run(self, hidden: Tensor, batch: ForwardBatch, kv: Sequence[Any], shallow: bool) -> Tensor:
        """Runs the layers, stores their KV and returns the residual stream [T, hidden_size].

        Args:
            hidden: [T, hidden_size], the input of the first layer.
            batch: the step.
            kv: each layer's part of the cache.
            shallow: see `Decoder.forward`.
        """
        if len(hidden) >= self.group.halves_from:
            layers_for = functools.partial(self.layers_for, kv=kv, shallow=shallow)
            return run_halves(self.group, hidden, batch, layers_for)
        for table in self.rotary:
            cast(RotaryTable, table).prepare(batch)
        x = Residual(hidden)
        deep = 0 if batch.given is None else batch.given.parts - 1
        for index, (layer, group, cache) in zip(
            self.own, self.layers_for(batch, kv, shallow), strict=False
        ):
            x = layer(x, batch, group, cache)
            if index < deep and batch.given is not None:
                given = batch.given
                x = Residual(ops.add_rows(x.total(), given.source, given.part(index + 1)))
        return x.total()

    def layers_for(self, batch: ForwardBatch, kv: Sequence[Any], shallow: bool) -> list[Any]:
        """Returns the layers to compute, each with its `GroupBatch` and its part of the cache."""
        stored = _stored_format(kv)
        for group_batch, layout in zip(batch.groups, self.kv_layouts, strict=True):
            group_batch.scratch.setdefault("workspace", self._workspace)
            if stored is not None and "schedule" not in group_batch.scratch:
                group_batch.scratch["schedule"] = layout.schedule(batch, self.dtype, stored)
        groups = [batch.groups[index] for index in self._layer_groups]
        own = self.own[: self._shallow] if shallow else self.own
        return [(self.layers[i], groups[i], cache) for i, cache in zip(own, kv, strict=False)]

    def most_skew(self, seq_lens: Tensor, kv: Sequence[Any]) -> float | None:
        """Returns the skew up to which the schedules of decodes are `even`, or None if no layer's
        schedule depends on it."""
        stored = _stored_format(kv)
        if stored is None:
            return None
        each = (layout.most_skew(seq_lens, self.dtype, stored) for layout in self.kv_layouts)
        return min((skew for skew in each if skew is not None), default=None)


class Decoder(DecoderLayers):
    """A whole model, from token ids to logits. Weights are uninitialized until `load_weights`."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(spec, build)
        self.embedding = VocabEmbedding(
            spec.vocab_size, spec.hidden_size, build.within("embedding")
        )
        self.positions: PositionEmbedding | None = None
        if spec.learned_positions is not None:
            self.positions = PositionEmbedding(
                spec.learned_positions, spec.hidden_size, build.within("positions")
            )
        self.norm = spec.norm.layer(spec.hidden_size, build.within("norm"))
        # The published code of models with an embedding scale rounds it to the model's dtype.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=build.dtype).item()
        tied = self.embedding if spec.tied_head and not build.quantization.own_head else None
        self.head = LMHead(spec.hidden_size, spec.vocab_size, build.within("head"), tied)

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[Any],
        *,
        shallow: bool = False,
        normed: bool = True,
    ) -> Tensor:
        """Computes a step, stores its KV and returns the final normed hidden states.

        Args:
            batch: the step.
            kv: each layer's part of the cache.
            shallow: whether to run only the first layers, until every kind has occurred, and one
                more. That compiles the kernels of all layers.
            normed: whether to apply the last norm. False only if `last_norm` is not None.

        Returns:
            [T, hidden_size] in the model's dtype.
        """
        hidden = self.run(self.enter(batch), batch, kv, shallow)
        return self.leave(hidden) if normed else hidden

    @property
    def last_norm(self) -> ops.RmsScale | None:
        """The norm behind the layers, which an op may apply itself; None if no op can."""
        # Draft heads keep what `forward` returns, which is the normed state.
        return None if self._forward_hooks else self.norm.scale

    def decode_front(self, kv: Sequence[Any]) -> tuple[Tensor, ops.AttentionHeads] | None:
        """Returns the embedding table and the attention of all layers, for `ops.expand_decodes`.

        Returns None if that op does not serve the model.
        """
        plain = self.positions is None and self._embedding_scale == 1.0 and self.group.world == 1
        layout, stored = self.kv_layouts[0], _stored_format(kv)
        if not plain or len(self.kv_layouts) > 1 or not isinstance(layout, KVLayout) or not stored:
            return None
        return self.embedding.weight, layout.attention(self.dtype, stored)

    def enter(self, batch: ForwardBatch) -> Tensor:
        """Returns the input of the first layer, [T, hidden_size]: the embeddings of the tokens."""
        embedded = self._embed(batch) if batch.embedded is None else batch.embedded
        if batch.given is None:
            return embedded
        return ops.replace_rows(embedded, batch.given.source, batch.given.part(0))

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the embeddings of the vocabulary and the positions, [T, hidden_size]."""
        embedded: Tensor = self.embedding(batch.input_ids)
        if self._embedding_scale != 1.0:
            embedded = embedded.mul_(self._embedding_scale)
        if self.positions is not None:
            embedded = embedded.add_(self.positions(batch.positions))
        return embedded

    def leave(self, hidden: Tensor) -> Tensor:
        """Returns the final normed hidden states from the output of the last layer, both
        [T, hidden_size]."""
        return self.norm(hidden)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab] of hidden states [N, hidden_size], in the model's dtype, on
        every rank."""
        logits, cap = self.head.logits(hidden), self.spec.logit_softcap
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _stored_format(kv: Sequence[Any]) -> ops.KVFormat | None:
    return next((own.format for own in kv if isinstance(own, ops.KVLayer)), None)


def _rope(layer: LayerSpec) -> RopeSpec | None:
    return getattr(layer.mixer, "rope", None)


def make_block(spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build) -> Any:
    """Returns a layer of the model."""
    plain = spec.norms == "input" and spec.mixer_norm and not spec.parallel
    if plain and spec.multiplier == 1.0:
        return Block(spec, model, rotary, build)
    return general_block(spec, model, rotary, build)
