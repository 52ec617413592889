"""gpt-oss: experts with biases and clamped gates, attention sinks, windows in every other layer
(OpenAI 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.experts import ExpertsSpec
from quire.models.families import experts, llama, settings
from quire.models.families.family import Family, Source
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing, Swiglu

_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.(up|down)\.(weight|bias|blocks|scales)")
_LAYOUTS = {name: name for name in ("interleaved", "each")}
_STEMS = {"up": "gate_up_proj", "down": "down_proj"}
_OWN = re.compile(r"layers\.(\d+)\.(?:mlp\.(router\.\w+)|attention\.(sinks)\.weight)")


def _source(spec: ModelSpec, name: str) -> Source:
    if found := _EXPERTS.fullmatch(name):
        index, part, tensor = found.groups()
        suffix = "" if tensor == "weight" else f"_{tensor}"
        return Source(f"model.layers.{index}.mlp.experts.{_STEMS[part]}{suffix}")
    if found := _OWN.fullmatch(name):
        index, router, sinks = found.groups()
        own = f"mlp.{router}" if router else f"self_attn.{sinks}"
        return Source(f"model.layers.{index}.{own}")
    return llama.source(spec, name)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec(config, "gpt_oss")
    bias = settings.flag(config, "attention_bias", True)
    width = settings.integer(config, "sliding_window", 128)
    if config.get("layer_types") is None:
        kinds = ("sliding_attention", "full_attention")
        config = {**config, "layer_types": [kinds[i % 2] for i in range(len(base.layers))]}
    windows = settings.windows(config, len(base.layers), width, first=0)
    base = llama.with_layers(
        base, {"qkv_bias": bias, "out_bias": bias, "sinks": True}, windows=windows
    )
    count = experts.count(config)
    ffn = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "intermediate_size", high=settings.MOST_FEATURES),
        routing=Routing(top_k=experts.top_k(config, count, 4)),
        act=Swiglu(
            alpha=settings.number(config, "swiglu_alpha", 1.702),
            limit=settings.number(config, "swiglu_limit", 7.0),
            shift=1.0,
        ),
        bias=True,
        router_bias=True,
        # The folders that Quire makes for GGUF files set `experts_layout`.
        layout=settings.choice(config, "experts_layout", _LAYOUTS, "interleaved"),
    )
    norm = replace(base.norm, eps=settings.number(config, "rms_norm_eps", 1e-5), wide=True)
    return replace(experts.with_experts(base, ffn, lambda index: True), norm=norm)


FAMILY = Family(
    name="gpt_oss",
    spec=_spec,
    source=_source,
    implements=("layer_types", *experts.COUNTS),
)
