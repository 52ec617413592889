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
from quire.models.families.family import Family
from quire.models.spec import ModelSpec
from quire.parallel import SingleGroup


class DraftHead(DecoderLayers):
    """One layer that drafts tokens for a target model.

    The head's input at position p is a pair: the target's hidden state at p, and the embedding of
    the token at p + 1. Its output gives the logits of the token at p + 2. When it drafts further,
    its own output replaces the target's hidden state in the next pair:

        target's hidden state at p ------+
                                         +-- head --> output --> logits of token p + 2
        embedding of token p + 1 --------+              |
                                                        +--> hidden state of the pair at p + 1

    Attributes:
        taps: numbers, from 1, of the target's layers after which the residual stream is read. If
            empty, the target's final normed states are read.
        embedding: the head's own embeddings, or None to use the target's.
        head: the head's own projection to logits, or None to use the target's.
        family: names the head's tensors in the target's checkpoint; None for a head with files of
            its own.
    """

    taps: tuple[int, ...] = ()
    family: Family | None = None

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
        """Width of the hidden states that are read from the target for each token."""
        return self.target.spec.hidden_size * max(1, len(self.taps))

    def own_embedding(self, build: Build) -> None:
        """Adds uninitialized embeddings, so that the target's are not used."""
        spec = self.spec
        where = build.within("embedding")
        self.embedding = VocabEmbedding(spec.vocab_size, spec.hidden_size, where)

    def own_head(self, vocab: int, build: Build) -> None:
        """Adds an uninitialized projection to `vocab` logits, so that the target's is not used."""
        self.head = LMHead(self.spec.hidden_size, vocab, build.within("head"))

    def combine(self, tapped: Tensor) -> Tensor:
        """Returns the pairs' hidden states [T, width] from the target's streams [T, tapped]."""
        return tapped

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, int32 [T], as [T, width]."""
        found: Tensor = (self.target.embedding if self.embedding is None else self.embedding)(ids)
        return found

    def forward(
        self, batch: ForwardBatch, kv: Sequence[Any], *, hidden: Tensor, shallow: bool = False
    ) -> Tensor:
        """Computes pairs, stores their KV and returns their outputs [T, width].

        Args:
            batch: `input_ids` holds, for each position p, the token at p + 1.
            kv: the layer's part of the cache.
            hidden: [T, width], the hidden states of the pairs.
            shallow: see `Decoder.forward`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab of the target] of outputs [N, width] of `forward`."""
        return self.target.logits(hidden) if self.head is None else self.head.logits(hidden)


def whole(build: Build) -> Build:
    """Returns settings for modules that every rank holds whole."""
    return replace(build, group=SingleGroup())


def share_equal(head: DraftHead) -> None:
    """Drops the head's embeddings and projection to logits if they equal the target's."""
    target = head.target
    if head.embedding is not None and _same(head.embedding.weight, target.embedding.weight):
        head.embedding = None
    if head.head is not None:
        own, other = head.head.weight, target.head.weight
        if own.scales is None and other.scales is None and _same(own.values, other.values):
            head.head = None


def _same(own: Tensor, other: Tensor) -> bool:
    return own.shape == other.shape and torch.equal(own, other)
