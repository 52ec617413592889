"""BERT and models with its architecture: MiniLM, BGE, GTE, E5 (Devlin et al. 2019)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec
from quire.layers.segment_attention import SegmentAttentionSpec
from quire.models.families import known_values, settings
from quire.models.families.family import Family, Source
from quire.models.spec import ClassifierSpec, EncoderSpec, LayerSpec, ModelSpec

_OUTER = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "classifier.dense": "pooler.dense",
    "classifier.out": "classifier",
    "projection": "linear",
}
_STEMS = {
    "attention.qkv.q": "attention.self.query",
    "attention.qkv.k": "attention.self.key",
    "attention.qkv.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_PLAIN = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Keys with the only values that are implemented."""
IGNORED = re.compile(r"^(embeddings\.(position|token_type)_ids$|pooler\.|cls\.|lm_head\.)")
"""Buffers, and heads for other tasks. The pooler belongs to the classification head."""


def source(spec: ModelSpec, name: str, outer: Mapping[str, str] = _OUTER) -> Source:
    """Returns the place of a parameter slice in the checkpoint.

    Args:
        spec: the model.
        name: name of the slice.
        outer: names of the modules outside of layers in the checkpoint, by this project's names.
    """
    stem, _, tensor = name.rpartition(".")
    if stem in outer:
        return Source(f"{outer[stem]}.{tensor}")
    _, index, stem = stem.split(".", 2)
    return Source(f"encoder.layer.{index}.{_STEMS[stem]}.{tensor}")


def base_spec(config: Mapping[str, Any], family: str) -> EncoderSpec:
    """Returns an encoder with post-norms and learned positions, without a head."""
    known_values.check(config, _PLAIN)
    hidden = settings.integer(config, "hidden_size", high=settings.MOST_FEATURES)
    layers = settings.integer(config, "num_hidden_layers", high=settings.MOST_LAYERS)
    heads, kv_heads, head_dim = settings.heads(config, hidden)
    if kv_heads != heads or heads * head_dim != hidden:
        raise ModelError(
            f"config.json: {heads} heads of {head_dim} numbers and {kv_heads} key/value heads are "
            f"not supported for an encoder of hidden_size {hidden}"
        )
    positions = settings.integer(
        config, "max_position_embeddings", 512, high=settings.MOST_POSITIONS
    )
    mixer = SegmentAttentionSpec(heads=heads, head_dim=head_dim, qkv_bias=True, out_bias=True)
    ffn = MlpSpec(
        width=settings.integer(config, "intermediate_size", high=settings.MOST_FEATURES),
        act=settings.choice(config, "hidden_act", ACTIVATIONS, "gelu"),
        bias=True,
    )
    return EncoderSpec(
        family=family,
        architecture=settings.architecture(config),
        vocab_size=settings.integer(config, "vocab_size", high=settings.MOST_TOKENS),
        hidden_size=hidden,
        norm=NormSpec(kind="layer", eps=settings.number(config, "layer_norm_eps", 1e-12)),
        layers=(LayerSpec(mixer, ffn, norms="sum"),) * layers,
        learned_positions=positions,
        tied_head=False,
        dtype=settings.dtype(config),
        max_positions=positions,
        bos_token_id=None,
        eos_token_ids=(),
        token_types=settings.integer(config, "type_vocab_size", 2, high=settings.MOST_TOKENS),
    )


def classifies(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint has a classification head."""
    return settings.architecture(config).endswith("ForSequenceClassification")


def classes(config: Mapping[str, Any]) -> int:
    """Returns the number of outputs of a classification head."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) and labels else None
    return settings.integer(
        config, "num_labels", 2 if count is None else count, high=settings.MOST_CLASSES
    )


def _spec(config: Mapping[str, Any]) -> EncoderSpec:
    spec = base_spec(config, "bert")
    if classifies(config):
        return replace(spec, classifier=ClassifierSpec(classes(config), "cls", "tanh"))
    if spec.architecture == "HF_ColBERT":
        return replace(spec, projection=settings.integer(config, "dim", 128))
    return spec


FAMILY = Family(
    name="bert",
    spec=_spec,
    source=source,
    prefixes={"bert.": ""},
    ignored=IGNORED,
)
