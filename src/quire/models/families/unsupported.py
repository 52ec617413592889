"""Keys of config.json that change the mathematics of a model and are not implemented."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelError

_OFF: tuple[Any, ...] = (None, False, 0)
_ONE: tuple[Any, ...] = (None, 1)

_HARMLESS: dict[str, tuple[Any, ...]] = {
    # attention
    "attention_chunk_size": _OFF,
    "attention_multiplier": (None,),
    "attn_logit_softcapping": _OFF,
    "attn_temperature_tuning": _OFF,
    "alibi": _OFF,
    "clip_qkv": _OFF,
    "dual_chunk_attention_config": (None,),
    "interleaved_sliding_window": (None,),
    "qk_norm": _OFF,
    "query_pre_attn_scalar": (None,),
    "sliding_window_pattern": _ONE,
    "use_qk_norm": _OFF,
    # positions
    "mrope_section": (None,),
    "llama_4_scaling_beta": _OFF,
    "no_rope_layer_interval": _OFF,
    "partial_rotary_factor": _ONE,
    "rotary_pct": _ONE,
    # scales of embeddings, residuals and logits
    "dim_model_base": (None,),
    "embedding_multiplier": _ONE,
    "final_logit_softcapping": _OFF,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "residual_multiplier": _ONE,
    "scale_depth": (None,),
    "scale_emb": _ONE,
    # structure
    "n_routed_experts": _OFF,
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
}
"""Maps keys to the values with which they change nothing.

`partial_rotary_factor` is here as the published code of Llama, Mistral and Qwen rotates whole heads
whatever it says: a checkpoint of theirs that has it was made for other code.
"""

_EACH_LAYER: dict[str, Any] = {"layer_types": "full_attention", "no_rope_layers": 1}
"""Maps keys with a value for each layer to the one that changes nothing."""


def check(config: Mapping[str, Any], implemented: Collection[str]) -> None:
    """Raises ModelError where config.json asks for what is not implemented.

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
