"""Refuses keys of config.json that change a model's computation and are not implemented."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelError

_UNUSED = (
    "attention_multiplier", "dim_model_base", "dual_chunk_attention_config",
    "interleaved_sliding_window", "mrope_section", "query_pre_attn_scalar", "scale_depth",
)  # fmt: skip
_OFF = (
    "alibi", "attention_chunk_size", "attn_logit_softcapping", "attn_temperature_tuning",
    "clip_qkv", "final_logit_softcapping", "llama_4_scaling_beta", "n_routed_experts",
    "no_rope_layer_interval", "num_experts", "num_local_experts", "parallel_attn", "qk_norm",
    "use_bidirectional_attention", "use_parallel_residual", "use_qk_norm",
)  # fmt: skip
_ONE = (
    "embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor",
    "residual_multiplier", "rotary_pct", "scale_emb", "sliding_window_pattern",
)  # fmt: skip
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNUSED, (None,)),
    **dict.fromkeys(_OFF, (None, False, 0)),
    **dict.fromkeys(_ONE, (None, 1)),
}
"""Maps each key to the values that leave the computation unchanged.

`partial_rotary_factor` is here because the published code of Llama, Mistral and Qwen ignores it and
rotates whole heads. A checkpoint that sets it was made for other code.
"""

_EACH_LAYER: dict[str, Any] = {"layer_types": "full_attention", "no_rope_layers": 1}
"""Maps keys with one value per layer to the value that leaves the computation unchanged."""


def check(config: Mapping[str, Any], implemented: Collection[str]) -> None:
    """Raises ModelError for a key that changes the computation and is not implemented.

    Args:
        implemented: keys that the model's family reads.
    """
    for where, keys in _objects(config):
        for name, value in keys.items():
            if name in implemented or _harmless(name, value):
                continue
            raise ModelError(
                f"config.json: {where}{name}={value!r} is not supported for this architecture"
            )


def _objects(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    found = [("", config)]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), Mapping):
            found.append((f"{name}.", config[name]))
    return found


def _harmless(name: str, value: Any) -> bool:
    if name in _EACH_LAYER:
        return value is None or (
            isinstance(value, list) and all(each == _EACH_LAYER[name] for each in value)
        )
    return name not in _HARMLESS or value in _HARMLESS[name]
