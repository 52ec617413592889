"""ModernBERT: an encoder with rotary positions, local and global layers and gated feed-forward
layers (Warner et al. 2024)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec
from quire.layers.rotary import RopeSpec
from quire.layers.segment_attention import SegmentAttentionSpec
from quire.models.families import rope, settings
from quire.models.families.bert import classes, classifies
from quire.models.families.family import Family, Source
from quire.models.spec import ClassifierSpec, EncoderSpec, LayerSpec, ModelSpec

_OUTER = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "norm": "final_norm",
    "classifier.dense": "head.dense",
    "classifier.norm": "head.norm",
    "classifier.out": "classifier",
}
_STEMS = {
    "attention_norm": "attn_norm",
    "attention.out": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "mlp.down": "mlp.Wo",
}
_QKV = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")
_UP = ("mlp.up.gate", "mlp.up.up")
_ACTIVATIONS = {"gelu": "gelu_and_mul", "silu": "silu_and_mul"}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETA = {
    _GLOBAL: ("global_rope_theta", 160_000.0),
    _LOCAL: ("local_rope_theta", 10_000.0),
}
"""Keys of transformers 4, and the values without them."""


def _source(spec: ModelSpec, name: str) -> Source:
    stem, _, tensor = name.rpartition(".")
    if stem in _OUTER:
        return Source(f"{_OUTER[stem]}.{tensor}")
    _, index, stem = stem.split(".", 2)
    for parts, stored in ((_QKV, "attn.Wqkv"), (_UP, "mlp.Wi")):
        if stem in parts:
            ffn = spec.layers[0].ffn
            assert isinstance(ffn, MlpSpec)
            size = spec.hidden_size if parts is _QKV else ffn.width
            start = parts.index(stem) * size
            return Source(f"layers.{index}.{stored}.{tensor}", span=(start, start + size))
    return Source(f"layers.{index}.{_STEMS[stem]}.{tensor}")


def _spec(config: Mapping[str, Any]) -> EncoderSpec:
    hidden = settings.integer(config, "hidden_size", 768, high=settings.MOST_FEATURES)
    heads = settings.integer(config, "num_attention_heads", 12, high=settings.MOST_HEADS)
    if hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads")
    positions = settings.integer(
        config, "max_position_embeddings", 8192, high=settings.MOST_POSITIONS
    )
    bias = settings.flag(config, "attention_bias", False)
    ffn = MlpSpec(
        width=settings.integer(config, "intermediate_size", 1152, high=settings.MOST_FEATURES),
        act=settings.choice(config, "hidden_activation", _ACTIVATIONS, "gelu"),
        bias=settings.flag(config, "mlp_bias", False),
    )
    reach = settings.integer(config, "local_attention", 128) // 2
    layers = []
    for index, kind in enumerate(_layer_types(config)):
        mixer = SegmentAttentionSpec(
            heads=heads,
            head_dim=hidden // heads,
            qkv_bias=bias,
            out_bias=bias,
            reach=reach if kind == _LOCAL and reach < positions - 1 else None,
            rope=_rope(config, kind, hidden // heads, positions),
        )
        # The embeddings are normed already.
        layers.append(LayerSpec(mixer, ffn, mixer_norm=index > 0))
    norm = NormSpec(
        kind="layer",
        eps=settings.number(config, "norm_eps", 1e-5),
        bias=settings.flag(config, "norm_bias", False),
    )
    spec = EncoderSpec(
        family="modernbert",
        architecture=settings.architecture(config),
        vocab_size=settings.integer(config, "vocab_size", high=settings.MOST_TOKENS),
        hidden_size=hidden,
        norm=norm,
        layers=tuple(layers),
        learned_positions=None,
        tied_head=False,
        dtype=settings.dtype(config),
        max_positions=positions,
        bos_token_id=None,
        eos_token_ids=(),
        last_norm=True,
    )
    return replace(spec, classifier=_classifier(config, norm)) if classifies(config) else spec


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    layers = settings.integer(config, "num_hidden_layers", 22, high=settings.MOST_LAYERS)
    kinds = config.get("layer_types")
    if kinds is None:
        every = settings.integer(config, "global_attn_every_n_layers", 3)
        return [_LOCAL if index % every else _GLOBAL for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {_GLOBAL, _LOCAL}:
        raise ModelError(
            f"config.json: layer_types must give each of {layers} layers one of: {_GLOBAL}, "
            f"{_LOCAL}"
        )
    return kinds


def _rope(config: Mapping[str, Any], kind: str, head_dim: int, positions: int) -> RopeSpec:
    """Returns the rotation of one kind of layers, global or local."""
    key, default = _THETA[kind]
    both = config.get("rope_parameters") or {}
    own = both.get(kind) if isinstance(both, Mapping) else None
    given = dict(own) if isinstance(own, Mapping) else {}
    if given.get("rope_theta") is None:
        given["rope_theta"] = settings.number(config, key, default)
    return rope.rope_spec({"rope_parameters": given}, head_dim, positions)


def _classifier(config: Mapping[str, Any], norm: NormSpec) -> ClassifierSpec:
    return ClassifierSpec(
        classes(config),
        settings.choice(config, "classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls"),
        settings.choice(config, "classifier_activation", {"gelu": "gelu"}, "gelu"),
        bias=settings.flag(config, "classifier_bias", False),
        norm=norm,
    )


FAMILY = Family(
    name="modernbert",
    spec=_spec,
    source=_source,
    prefixes={"model.": ""},
    # The head for masked tokens. `head.` belongs to the classification head too.
    ignored=re.compile(r"^(head|decoder)\."),
    implements=("layer_types",),
)
