"""Llama 1 to 3.x and models with its architecture: TinyLlama, SmolLM (Touvron et al. 2023)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from quire.layers.attention import AttentionSpec
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec
from quire.models.families import rope, settings
from quire.models.families.family import Family, Source
from quire.models.spec import LayerSpec, ModelSpec

_STEMS = {
    "attention_norm": "input_layernorm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up.gate": "mlp.gate_proj",
    "mlp.up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def source(spec: ModelSpec, name: str, stems: Mapping[str, str] = _STEMS) -> Source:
    """Returns the place of a parameter slice in the checkpoint.

    Args:
        spec: the model.
        name: name of the slice.
        stems: names of a layer's submodules in the checkpoint, by this project's names.
    """
    stem, _, tensor = name.rpartition(".")
    if stem in _OUTER:
        return Source(f"{_OUTER[stem]}.{tensor}")
    _, index, stem = stem.split(".", 2)
    return Source(f"model.layers.{index}.{stems.get(stem) or _STEMS[stem]}.{tensor}")


def base_spec(config: Mapping[str, Any], family: str) -> ModelSpec:
    """Returns a Llama without biases or windows, which related families modify."""
    hidden = settings.integer(config, "hidden_size", high=settings.MOST_FEATURES)
    layers = settings.integer(config, "num_hidden_layers", high=settings.MOST_LAYERS)
    heads, kv_heads, head_dim = settings.heads(config, hidden)
    trained = settings.integer(
        config, "max_position_embeddings", 2048, high=settings.MOST_POSITIONS
    )
    turns = rope.rope_spec(config, head_dim, trained)
    mixer = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=False,
        out_bias=False,
        rope=turns,
    )
    ffn = MlpSpec(
        width=settings.integer(config, "intermediate_size", high=settings.MOST_FEATURES),
        act=settings.choice(config, "hidden_act", {"silu": "silu_and_mul"}, "silu"),
        bias=False,
    )
    return ModelSpec(
        family=family,
        architecture=settings.architecture(config),
        vocab_size=settings.integer(config, "vocab_size", high=settings.MOST_TOKENS),
        hidden_size=hidden,
        norm=NormSpec(kind="rms", eps=settings.number(config, "rms_norm_eps", 1e-6)),
        layers=(LayerSpec(mixer, ffn),) * layers,
        learned_positions=None,
        tied_head=settings.flag(config, "tie_word_embeddings", False),
        dtype=settings.dtype(config),
        max_positions=rope.max_positions(turns, trained),
        bos_token_id=settings.bos_token_id(config),
        eos_token_ids=settings.token_ids(config, "eos_token_id"),
    )


def with_layers(
    spec: ModelSpec,
    mixer: Mapping[str, Any],
    ffn: Mapping[str, Any] | None = None,
    windows: Sequence[int | None] | None = None,
    **shape: Any,
) -> ModelSpec:
    """Returns the spec with changed fields of its mixers, feed-forward layers and `LayerSpec`s, and
    with each layer's window."""
    windows = windows or [own.window for own in spec.attention]
    changed = []
    for layer, window in zip(spec.layers, windows, strict=True):
        own = replace(cast(Any, layer.mixer), **mixer, window=window)
        own_ffn = replace(cast(Any, layer.ffn), **(ffn or {}))
        changed.append(replace(layer, mixer=own, ffn=own_ffn, **shape))
    return replace(spec, layers=tuple(changed))


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = base_spec(config, "llama")
    bias = settings.flag(config, "attention_bias", False)
    mlp_bias = settings.flag(config, "mlp_bias", False)
    return with_layers(base, {"qkv_bias": bias, "out_bias": bias}, {"bias": mlp_bias})


IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""A buffer in early checkpoints. It is ignored because it follows from the config."""

FAMILY = Family(
    name="llama",
    spec=_spec,
    source=source,
    ignored=IGNORED,
)
