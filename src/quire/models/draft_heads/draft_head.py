"""The interface of draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.models.decoder import Decoder, DecoderLayers
from quire.models.spec import ModelSpec
from quire.parallel import SingleGroup


class DraftHead(DecoderLayers):
    """One layer over pairs: at position p, what the target computed there and the embedding of the
    token behind, at p + 1. Of what it gives, logits say the token at p + 2; in place of what the
    target computed, it is the next pair's.

    taps: numbers of the target's layers behind which the stream is read; empty: the final normed
        states are.
    target: the model whose tokens are drafted. It lends its embeddings, and its head, unless the
        draft head has its own.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, spec: ModelSpec, target: Decoder, build: Build) -> None:
        super().__init__(spec, build)
        # Lists hide the target's modules from the module tree.
        self._target = [target]
        self.embedding: VocabEmbedding | None = None
        self.head: LMHead | None = None
        self.norm = spec.norm.layer(spec.hidden_size, build.within("norm"))

    @property
    def target(self) -> Decoder:
        return self._target[0]

    @property
    def tapped(self) -> int:
        """The width of what is read of the target."""
        return self.target.spec.hidden_size * max(1, len(self.taps))

    def own_embedding(self, build: Build) -> None:
        """Gives it embeddings of its own."""
        spec = self.spec
        where = build.within("embedding")
        self.embedding = VocabEmbedding(spec.vocab_size, spec.hidden_size, where)

    def own_head(self, vocab: int, build: Build) -> None:
        """Gives it a head of its own, for so many tokens."""
        self.head = LMHead(self.spec.hidden_size, vocab, build.within("head"))

    def combine(self, tapped: Tensor) -> Tensor:
        """Returns what is a pair's, [T, width], from what was read of the target, [T, tapped]."""
        return tapped

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, int32 [T], as [T, width]."""
        found: Tensor = (self.target.embedding if self.embedding is None else self.embedding)(ids)
        return found

    def forward(
        self, batch: ForwardBatch, kv: Sequence[Any], *, hidden: Tensor, shallow: bool = False
    ) -> Tensor:
        """Computes pairs, and stores their KV at their positions.

        batch: its ids are the tokens behind the positions. hidden: [T, width]. Returns [T, width].
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab of the target] of what `forward` gave."""
        return self.target.logits(hidden) if self.head is None else self.head.logits(hidden)


def whole(build: Build) -> Build:
    """Returns the value for parts that every rank holds whole."""
    return replace(build, group=SingleGroup())


def share_equal(head: DraftHead) -> None:
    """Drops embeddings, and a head, that are the target's over again."""
    target = head.target
    if head.embedding is not None and _same(head.embedding.weight, target.embedding.weight):
        head.embedding = None
    if head.head is not None:
        own, other = head.head.weight, target.head.weight
        if own.scales is None and other.scales is None and _same(own.values, other.values):
            head.head = None


def _same(own: Tensor, other: Tensor) -> bool:
    return own.shape == other.shape and torch.equal(own, other)
