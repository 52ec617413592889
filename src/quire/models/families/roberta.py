"""RoBERTa and XLM-R: BERT with other positions and another head (Liu et al. 2019, Conneau et al.
2020)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.families import bert, settings
from quire.models.families.family import Family
from quire.models.spec import ClassifierSpec, EncoderSpec

_OUTER = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "classifier.dense": "classifier.dense",
    "classifier.out": "classifier.out_proj",
}


def _spec(config: Mapping[str, Any]) -> EncoderSpec:
    base = bert.base_spec({"type_vocab_size": 1, **config}, "roberta")
    # Positions begin behind the padding token's id.
    first = 1 + settings.integer(config, "pad_token_id", 1, low=0)
    if base.max_positions <= first:
        raise ModelError(
            f"config.json: max_position_embeddings {base.max_positions} leaves no position behind "
            f"pad_token_id {first - 1}"
        )
    head = None
    if bert.classifies(config):
        head = ClassifierSpec(bert.classes(config), "cls", "tanh")
    longest = base.max_positions - first
    return replace(base, first_position=first, max_positions=longest, classifier=head)


FAMILY = Family(
    name="roberta",
    spec=_spec,
    source=functools.partial(bert.source, outer=_OUTER),
    prefixes={"roberta.": ""},
    ignored=bert.IGNORED,
)
