"""EXAONE 4: norms on the outputs of a layer's parts and on heads of q and k. If some layers have a
window, only these have rotary positions (LG AI Research 2025)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from quire.models.families import layer_types, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_STEMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({"rms_norm_eps": 1e-5, **config}, "exaone4")
    mixer = {"qk_norm": base.norm}
    explicit_null = "sliding_window" in config and config["sliding_window"] is None
    if explicit_null:
        return llama.with_layers(base, mixer, norms="output")
    width = settings.integer(config, "sliding_window", 4096)
    windows = layer_types.windows(config, len(base.layers), 4, width)
    spec = llama.with_layers(base, mixer, windows=windows, norms="output")
    ropes = [None if mixer.window is None else mixer.rope for mixer in spec.attention]
    return layer_types.with_ropes(spec, ropes)


FAMILY = Family(
    name="exaone4",
    spec=_spec,
    source=functools.partial(llama.source, stems=_STEMS),
    ignored=llama.IGNORED,
    implements=("layer_types", "sliding_window_pattern"),
)
