"""OLMo 2 and 3: norms on the outputs of a layer's parts, and over all heads of q and of k (OLMo
2025)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from quire.layers.attention_variants import ProjectionNormSpec
from quire.models.families import layer_types, llama, rope, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_STEMS = {
    "attention.q_projection_norm": "self_attn.q_norm",
    "attention.k_projection_norm": "self_attn.k_norm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    far, near = layer_types.rope_settings(config, None, 10000.0)
    base = llama.base_spec({"rms_norm_eps": 1e-5, **config, **far}, "olmo2")
    bias = settings.flag(config, "attention_bias", False)
    norm = replace(base.norm, wide=True)
    layer = base.layers[0]
    mixer = base.attention[0]
    own = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
    own |= {"qkv_bias": bias, "out_bias": bias, "projection_norm": norm}
    spec = replace(
        base,
        norm=norm,
        layers=(replace(layer, mixer=ProjectionNormSpec(**own), norms="output"),)
        * len(base.layers),
    )
    if base.architecture != "Olmo3ForCausalLM":
        return spec
    width = settings.integer(config, "sliding_window", 4096)
    windows = layer_types.windows(config, len(base.layers), 4, width)
    trained = settings.integer(
        config, "max_position_embeddings", 2048, high=settings.MOST_POSITIONS
    )
    local = rope.rope_spec({**config, **near}, base.head_dims[0], trained)
    spec = llama.with_layers(spec, {}, windows=windows)
    ropes = [mixer.rope if mixer.window is None else local for mixer in spec.attention]
    return layer_types.with_ropes(spec, ropes)


FAMILY = Family(
    name="olmo2",
    spec=_spec,
    source=functools.partial(llama.source, stems=_STEMS),
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
