"""Qwen3-Next: three layers in four are gated delta nets, the others attention with an output gate
(Qwen Team 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.attention_variants import GatedAttentionSpec
from quire.layers.expert_weights import Layout
from quire.layers.experts import ExpertsSpec
from quire.layers.gated_delta import GatedDeltaSpec
from quire.layers.norm import NormSpec
from quire.models.families import experts, llama, settings
from quire.models.families.family import Family, Source
from quire.models.spec import LayerSpec, MixerSpec, ModelSpec
from quire.ops.experts import Routing

IMPLEMENTS = ("layer_types", "partial_rotary_factor", *experts.COUNTS)
KINDS = "linear_attention", "full_attention"

PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model."}
IGNORED = re.compile(r"^(model\.)?(visual|vision_tower)\.|^mtp\.")
"""Weights that are skipped: the vision model, and the MTP layers, which only speculation reads."""

_rest = experts.source(shared="shared_expert")
_DELTA = {
    "out.weight": "out_proj.weight",
    "norm.weight": "norm.weight",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}


def base_spec(config: Mapping[str, Any], family: str) -> ModelSpec:
    """Returns the architecture with dense feed-forward layers of `intermediate_size`."""
    defaults = {"head_dim": 256, "partial_rotary_factor": 0.25}
    base = llama.base_spec({**defaults, **config}, family)
    norm = NormSpec(kind="rms", eps=base.norm.eps, offset=1.0, wide=True)
    attention = base.attention[0]
    bias = settings.flag(config, "attention_bias", False)
    full = GatedAttentionSpec(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        rope=attention.rope,
    )
    linear = _delta_spec(config, base.norm.eps)
    mixers: dict[str, MixerSpec] = {"linear_attention": linear, "full_attention": full}
    layers = [
        LayerSpec(mixers[kind], layer.ffn)
        for kind, layer in zip(_kinds(config, len(base.layers)), base.layers, strict=True)
    ]
    return replace(base, norm=norm, layers=tuple(layers))


def _delta_spec(config: Mapping[str, Any], eps: float) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        key_heads=settings.integer(config, "linear_num_key_heads", 16),
        value_heads=settings.integer(config, "linear_num_value_heads", 32),
        key_dim=settings.integer(config, "linear_key_head_dim", 128),
        value_dim=settings.integer(config, "linear_value_head_dim", 128),
        taps=settings.integer(config, "linear_conv_kernel_dim", 4, low=2),
        norm_eps=eps,
    )
    if spec.value_heads % spec.key_heads:
        raise ModelError(
            f"config.json: {spec.value_heads} value heads cannot share {spec.key_heads} key heads "
            "of linear attention evenly"
        )
    return spec


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        every = settings.integer(config, "full_attention_interval", 4)
        return [KINDS[int(index % every == 0)] for index in range(1, layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in KINDS for k in kinds):
        raise ModelError(
            f"config.json: layer_types must give each of {layers} layers one of: {', '.join(KINDS)}"
        )
    if "full_attention" not in kinds:
        raise ModelError("config.json: a model without full_attention layers is not supported")
    return kinds


def delta_spec_of(spec: ModelSpec, name: str) -> GatedDeltaSpec | None:
    """Returns the spec of the gated delta net that a parameter slice belongs to, or None."""
    match = re.match(r"layers\.(\d+)\.attention\.", name)
    mixer = None if match is None else spec.layers[int(match[1])].mixer
    return mixer if isinstance(mixer, GatedDeltaSpec) else None


def common_source(spec: ModelSpec, name: str) -> Source | None:
    """Returns the place of a slice if all generations store it alike, else None."""
    delta = delta_spec_of(spec, name)
    _, index, _, stem = [*name.split(".", 3), "", ""][:4]
    if delta is None:
        if stem.startswith(("qkv.q.", "qkv.gate.")) and name.startswith("layers."):
            # The tensor has each head's queries, then its gates.
            dim = spec.attention[0].head_dim
            tensor = name.rpartition(".")[2]
            offset = dim if stem.startswith("qkv.gate.") else 0
            stored = f"model.layers.{index}.self_attn.q_proj.{tensor}"
            return Source(stored, every=(offset, dim, 2 * dim))
        return _rest(spec, name)
    linear = f"model.layers.{index}.linear_attn"
    if stem in _DELTA:
        return Source(f"{linear}.{_DELTA[stem]}")
    if stem.startswith("conv."):
        return Source(f"{linear}.conv1d.weight", span=_stacked(delta)[stem.split(".")[1]])
    return None


def _stacked(delta: GatedDeltaSpec) -> dict[str, tuple[int, int]]:
    """Returns [start, end) of q, k and v in a tensor that has all of q, then k, then v."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}


def stacked_source(spec: ModelSpec, name: str) -> Source:
    """Returns a slice's place in checkpoints with one tensor for q, k and v, and one each for z, b
    and a."""
    found = common_source(spec, name)
    delta = delta_spec_of(spec, name)
    if found is not None or delta is None:
        return found or _rest(spec, name)
    _, index, _, _, part, tensor = name.split(".")
    linear = f"model.layers.{index}.linear_attn"
    if part in ("q", "k", "v"):
        return Source(f"{linear}.in_proj_qkv.{tensor}", span=_stacked(delta)[part])
    return Source(f"{linear}.in_proj_{part}.{tensor}")


def _source(spec: ModelSpec, name: str) -> Source:
    found = common_source(spec, name)
    delta = delta_spec_of(spec, name)
    if found is not None or delta is None:
        return found or _rest(spec, name)
    _, index, _, _, part, tensor = name.split(".")
    linear = f"model.layers.{index}.linear_attn"
    # The tensors are ordered by key head.
    serves = delta.value_heads // delta.key_heads
    key, value = delta.key_dim, serves * delta.value_dim
    sizes = {"q": key, "k": key, "v": value, "z": value}
    stored = "in_proj_qkvz"
    if part in ("b", "a"):
        sizes, stored = {"b": serves, "a": serves}, "in_proj_ba"
    before = list(sizes)[: list(sizes).index(part)]
    offset = sum(sizes[each] for each in before)
    every = offset, sizes[part], sum(sizes.values())
    return Source(f"{linear}.{stored}.{tensor}", every=every)


def with_experts(spec: ModelSpec, config: Mapping[str, Any], layout: Layout) -> ModelSpec:
    """Returns the spec with experts and a shared expert in its sparse layers."""
    if not config.get("num_experts"):
        return spec
    count = experts.count(config)
    ffn = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "moe_intermediate_size", 512, high=settings.MOST_FEATURES),
        routing=Routing(
            top_k=experts.top_k(config, count, 10),
            renormalize=settings.flag(config, "norm_topk_prob", True),
        ),
        shared_width=settings.integer(
            config, "shared_expert_intermediate_size", 512, high=settings.MOST_FEATURES
        ),
        shared_gate=True,
        layout=layout,
    )
    step = settings.integer(config, "decoder_sparse_step", 1)
    dense = experts.indices(config, "mlp_only_layers")
    return experts.with_experts(
        spec, ffn, lambda index: index not in dense and (index + 1) % step == 0
    )


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = base_spec(config, "qwen3_next")
    return with_experts(spec, {"num_experts": 512, **config}, "each")


FAMILY = Family(
    name="qwen3_next",
    spec=_spec,
    source=_source,
    prefixes=PREFIXES,
    ignored=IGNORED,
    implements=IMPLEMENTS,
)
