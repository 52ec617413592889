"""GPT-2: learned positions, LayerNorm, GELU, transposed weights (Radford et al. 2019)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.layers.attention import AttentionSpec
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec
from quire.models.families import settings
from quire.models.families.family import Family, Source
from quire.models.spec import LayerSpec, ModelSpec

_OUTER = {"embedding": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"}
_STEMS = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_QKV = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


def _source(spec: ModelSpec, name: str) -> Source:
    stem, _, tensor = name.rpartition(".")
    if stem in _OUTER:
        return Source(f"{_OUTER[stem]}.{tensor}")
    _, index, stem = stem.split(".", 2)
    # Conv1D stores its matrices as [inputs, outputs].
    transposed = tensor == "weight" and "norm" not in stem
    if stem in _QKV:
        start = _QKV.index(stem) * spec.hidden_size
        span = start, start + spec.hidden_size
        return Source(f"h.{index}.attn.c_attn.{tensor}", transposed, span)
    return Source(f"h.{index}.{_STEMS[stem]}.{tensor}", transposed)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if settings.flag(config, name, False):
            raise ModelError(f"config.json: {name} is not supported")
    hidden = settings.integer(config, "n_embd", high=settings.MOST_FEATURES)
    layers = settings.integer(config, "n_layer", high=settings.MOST_LAYERS)
    heads = settings.integer(config, "n_head", high=settings.MOST_HEADS)
    if hidden % heads:
        raise ModelError(f"config.json: n_embd {hidden} is not a multiple of {heads} heads")
    head_dim = hidden // heads
    positions = settings.integer(config, "n_positions", 1024, high=settings.MOST_POSITIONS)
    scaled = settings.flag(config, "scale_attn_weights", True)
    mixer = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaled else 1.0,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = MlpSpec(
        width=settings.integer(config, "n_inner", 4 * hidden, high=settings.MOST_FEATURES),
        act=settings.choice(config, "activation_function", _ACTIVATIONS, "gelu_new"),
        bias=True,
    )
    return ModelSpec(
        family="gpt2",
        architecture=settings.architecture(config),
        vocab_size=settings.integer(config, "vocab_size", high=settings.MOST_TOKENS),
        hidden_size=hidden,
        norm=NormSpec(kind="layer", eps=settings.number(config, "layer_norm_epsilon", 1e-5)),
        layers=(LayerSpec(mixer, ffn),) * layers,
        learned_positions=positions,
        tied_head=settings.flag(config, "tie_word_embeddings", True),
        dtype=settings.dtype(config),
        max_positions=positions,
        bos_token_id=settings.bos_token_id(config),
        eos_token_ids=settings.token_ids(config, "eos_token_id"),
    )


FAMILY = Family(
    name="gpt2",
    spec=_spec,
    source=_source,
    prefixes={"transformer.": ""},
    # Causal masks, which the first release saved too.
    ignored=re.compile(r"^h\.\d+\.attn\.(bias|masked_bias)$"),
)
