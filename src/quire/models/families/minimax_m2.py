"""MiniMax-M2: a router with sigmoids, norms over all heads of q and of k (MiniMax 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from quire.errors import ModelError
from quire.layers.attention_variants import ProjectionNormSpec
from quire.layers.experts import ExpertsSpec
from quire.models.families import experts, known_values, llama, mixtral, settings
from quire.models.families.family import Family, Source
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing

_KNOWN: dict[str, tuple[Any, ...]] = {
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
"""Supported values of keys that some configs have. Published code computes no others."""
_NORMS = {
    "attention.q_projection_norm": "self_attn.q_norm",
    "attention.k_projection_norm": "self_attn.k_norm",
}
_experts_source = experts.source(
    "block_sparse_moe", mixtral.NAMES, correction="e_score_correction_bias"
)


def _source(spec: ModelSpec, name: str) -> Source:
    for own, stored in _NORMS.items():
        if f".{own}." in name:
            return Source("model." + name.replace(own, stored))
    return _experts_source(spec, name)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    known_values.check(config, _KNOWN)
    kinds = config.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ModelError("config.json: attn_type_list has layers without full attention")
    if config.get("rotary_dim") is not None:
        rotary = settings.integer(config, "rotary_dim")
        config = {**config, "partial_rotary_factor": rotary / settings.integer(config, "head_dim")}
    base = llama.base_spec(config, "minimax_m2")
    layer = base.layers[0]
    plain = base.attention[0]
    own = {field.name: getattr(plain, field.name) for field in fields(plain)}
    mixer = ProjectionNormSpec(**own, projection_norm=base.norm)
    base = replace(base, layers=(replace(layer, mixer=mixer),) * len(base.layers))
    count = experts.count(config)
    ffn = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "intermediate_size", high=settings.MOST_FEATURES),
        routing=Routing(top_k=experts.top_k(config, count, 8), score="sigmoid"),
        correction=True,
    )
    return experts.with_experts(base, ffn, lambda index: True)


FAMILY = Family(
    name="minimax_m2",
    spec=_spec,
    source=_source,
    ignored=llama.IGNORED,
    implements=("partial_rotary_factor", "use_qk_norm", *experts.COUNTS),
)
