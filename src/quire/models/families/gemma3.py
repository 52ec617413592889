"""Gemma 3: Gemma 2 with norms of q and k instead of soft-caps, and with two bases for rotary
positions (Gemma Team 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.families import gemma2, layer_types, llama, rope, settings
from quire.models.families.family import Family
from quire.models.families.text_config import PREFIXES, VISION
from quire.models.spec import ModelSpec

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "bos_token_id": 2,
}
"""Values of keys that published configs leave out."""


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    layers = settings.integer(config, "num_hidden_layers", high=settings.MOST_LAYERS)
    windows = layer_types.windows(
        config, layers, 6, settings.integer(config, "sliding_window", 4096)
    )
    far, near = layer_types.rope_settings(config, "rope_local_base_freq", 10000.0)
    base = gemma2.base_spec({**config, **far}, "gemma3", windows)
    trained = settings.integer(config, "max_position_embeddings", high=settings.MOST_POSITIONS)
    head_dim = base.head_dims[0]
    local = rope.rope_spec({**config, **near}, head_dim, trained)
    ropes = [local if m.window is not None else m.rope for m in base.attention]
    base = llama.with_layers(base, {"qk_norm": base.norm})
    # `max_position_embeddings` already includes the scaling.
    return replace(layer_types.with_ropes(base, ropes), max_positions=trained)


FAMILY = Family(
    name="gemma3",
    spec=_spec,
    source=gemma2.source,
    prefixes=PREFIXES,
    ignored=re.compile(f"{VISION.pattern}|{llama.IGNORED.pattern}"),
    implements=(*gemma2.IMPLEMENTS, "sliding_window_pattern"),
)
