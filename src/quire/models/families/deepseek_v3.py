"""DeepSeek-V3 and R1, and the text model of Kimi-K2 and K2.5: latent attention, experts chosen
within groups, and a shared expert (DeepSeek-AI 2024)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.experts import ExpertsSpec
from quire.layers.latent_attention import LatentAttentionSpec
from quire.layers.norm import NormSpec
from quire.models.families import experts, glm4_moe, known_values, llama, settings
from quire.models.families.family import Family, Source
from quire.models.families.rope import temperature
from quire.models.families.text_config import PREFIXES
from quire.models.spec import ModelSpec

IMPLEMENTS = experts.COUNTS

_STEMS = {
    "inputs.q": "q_proj",
    "inputs.q_a": "q_a_proj",
    "inputs.kv_a": "kv_a_proj_with_mqa",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "out": "o_proj",
}
_ATTENTION = re.compile(r"layers\.(\d+)\.attention\.(.+)\.([^.]+)")
_KNOWN: dict[str, tuple[Any, ...]] = {
    # The sparse attention of V3.2 is not supported.
    "index_topk": (),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Supported values of keys that some configs have. Published code computes no others."""

_experts_source = experts.source()


def source(spec: ModelSpec, name: str) -> Source:
    """Returns the place of a parameter slice in the checkpoint."""
    if found := _ATTENTION.fullmatch(name):
        index, stem, tensor = found.groups()
        return Source(f"model.layers.{index}.self_attn.{_STEMS[stem]}.{tensor}")
    return _experts_source(spec, name)


def base_spec(config: Mapping[str, Any], family: str) -> ModelSpec:
    """Returns the architecture with latent attention and dense feed-forward layers."""
    rotary_dim = settings.integer(config, "qk_rope_head_dim", 64)
    # The other keys about heads do not apply to latent attention.
    base = llama.base_spec({**config, "head_dim": rotary_dim, "num_key_value_heads": None}, family)
    plain = base.attention[0]
    if plain.rope is None:
        raise ModelError("config.json: latent attention needs rotary positions")
    query_rank = None
    if config.get("q_lora_rank") is not None:
        query_rank = settings.integer(config, "q_lora_rank", high=settings.MOST_FEATURES)
    bias = settings.flag(config, "attention_bias", False)
    if bias and query_rank is None:
        raise ModelError("config.json: attention_bias=True is not supported without q_lora_rank")
    key_dim = settings.integer(config, "qk_nope_head_dim", 128)
    mixer = LatentAttentionSpec(
        heads=plain.heads,
        rank=settings.integer(config, "kv_lora_rank", 512),
        query_rank=query_rank,
        key_dim=key_dim,
        value_dim=settings.integer(config, "v_head_dim", 128),
        scale=(key_dim + rotary_dim) ** -0.5 * _sharpness(config) ** 2,
        # Published code uses this epsilon for latents, regardless of config.json.
        norm=NormSpec(kind="rms", eps=1e-6),
        rope=replace(plain.rope, interleaved=settings.flag(config, "rope_interleave", True)),
        bias=bias,
    )
    return replace(base, layers=(replace(base.layers[0], mixer=mixer),) * len(base.layers))


def _sharpness(config: Mapping[str, Any]) -> float:
    """Returns YaRN's factor for queries, which is also the factor for keys."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return temperature(
        settings.number(scaling, "factor"), settings.number(scaling, "mscale_all_dim")
    )


def experts_spec(config: Mapping[str, Any]) -> ExpertsSpec:
    """Returns experts that the router scores with sigmoids and chooses within groups."""
    count = experts.count(config)
    width = settings.integer(config, "moe_intermediate_size", high=settings.MOST_FEATURES)
    return ExpertsSpec(
        experts=count,
        width=width,
        routing=glm4_moe.routing(config, count),
        correction=True,
        shared_width=width * settings.integer(config, "n_shared_experts", 1, low=0),
    )


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    known_values.check(config, _KNOWN)
    base = base_spec(config, "deepseek_v3")
    dense = settings.integer(config, "first_k_dense_replace", 3, low=0)
    return experts.with_experts(base, experts_spec(config), lambda index: index >= dense)


FAMILY = Family(
    name="deepseek_v3",
    spec=_spec,
    source=source,
    prefixes=PREFIXES,
    # The MTP layer after the last layer, and the vision model.
    ignored=re.compile(
        rf"{llama.IGNORED.pattern}|^model\.layers\.61\.|^(model\.)?(vision_tower|mm_projector)\."
    ),
    implements=IMPLEMENTS,
)
