"""Mixtral: Mistral with experts (Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.layers.experts import ExpertsSpec
from quire.models.families import experts, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec(config, "mixtral")
    width = config.get("sliding_window")
    if width is not None:
        width = settings.integer(config, "sliding_window")
    base = llama.with_layers(base, {}, windows=(width,) * len(base.layers))
    count = experts.count(config)
    ffn = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "intermediate_size", high=settings.MOST_FEATURES),
        routing=Routing(top_k=experts.top_k(config, count, 2)),
    )
    return experts.with_experts(base, ffn, lambda index: True)


FAMILY = Family(
    name="mixtral",
    spec=_spec,
    source=experts.source("block_sparse_moe", NAMES),
    ignored=llama.IGNORED,
    implements=experts.COUNTS,
)
