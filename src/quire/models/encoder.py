"""Encoders, which run any `EncoderSpec`: hidden states of whole texts, classes, token vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.embedding import PositionEmbedding, VocabEmbedding
from quire.layers.linear import Linear
from quire.models.decoder import DecoderLayers
from quire.models.spec import ClassifierSpec, EncoderSpec
from quire.parallel import SingleGroup
from quire.quantization import Unquantized


class Encoder(DecoderLayers):
    """A whole encoder, from token ids to hidden states. It has no head for tokens."""

    spec: EncoderSpec
    gives_logits = False
    last_norm = None

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__(spec, build)
        hidden = spec.hidden_size
        self.embedding = VocabEmbedding(spec.vocab_size, hidden, build.within("embedding"))
        self.positions: PositionEmbedding | None = None
        if spec.learned_positions is not None:
            self.positions = PositionEmbedding(
                spec.learned_positions, hidden, build.within("positions")
            )
        self.token_types: PositionEmbedding | None = None
        if spec.token_types:
            self.token_types = PositionEmbedding(
                spec.token_types, hidden, build.within("token_types")
            )
        self.embedding_norm = spec.norm.layer(hidden, build.within("embedding_norm"))
        self.norm = spec.norm.layer(hidden, build.within("norm")) if spec.last_norm else None
        # Heads are small, so every rank holds them whole, as floats.
        whole = replace(build, group=SingleGroup(), quantization=Unquantized())
        self.classifier: Classifier | None = None
        if spec.classifier is not None:
            self.classifier = Classifier(spec.classifier, hidden, whole.within("classifier"))
        self.projection: Linear | None = None
        if spec.projection:
            self.projection = Linear(
                hidden, spec.projection, whole.within("projection"), bias=False, split="outputs"
            )

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[Any],
        *,
        shallow: bool = False,
        normed: bool = True,
    ) -> Tensor:
        """Returns the hidden states of a step, [T, hidden_size] in the model's dtype.

        Args:
            batch: the step. Its rows are whole texts.
            kv: one entry for each layer.
            shallow: see `Decoder.forward`.
            normed: see `Decoder.forward`.
        """
        hidden = self.run(self.enter(batch), batch, kv, shallow)
        return hidden if self.norm is None else self.norm(hidden)

    def enter(self, batch: ForwardBatch) -> Tensor:
        """Returns the input of the first layer, [T, hidden_size]."""
        embedded: Tensor = self.embedding(batch.input_ids)
        if self.positions is not None:
            embedded = embedded.add_(self.positions(batch.positions + self.spec.first_position))
        if self.token_types is not None:
            types = batch.token_types
            embedded = embedded.add_(
                self.token_types.weight[0] if types is None else self.token_types(types)
            )
        return self.embedding_norm(embedded)  # type: ignore[no-any-return]

    def decode_front(self, kv: Sequence[Any]) -> None:
        """Returns None, because an encoder does not decode."""


class Classifier(nn.Module):
    """See `ClassifierSpec`."""

    def __init__(self, spec: ClassifierSpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.dense = Linear(hidden, hidden, build.within("dense"), bias=spec.bias, split="outputs")
        self.norm = None if spec.norm is None else spec.norm.layer(hidden, build.within("norm"))
        self.out = Linear(hidden, spec.classes, build.within("out"), bias=True, split="outputs")

    def forward(self, states: Tensor) -> Tensor:
        """Returns the logits of classes, float32 [N, classes], of states [N, hidden_size]."""
        inner = self.dense(states)
        inner = torch.tanh(inner) if self.spec.act == "tanh" else ops.activate(inner, "gelu")
        if self.norm is not None:
            inner = self.norm(inner)
        return self.out(inner).float()  # type: ignore[no-any-return]
