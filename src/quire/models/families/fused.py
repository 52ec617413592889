"""Places in checkpoints that store several projections in one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from quire.layers.attention import AttentionSpec
from quire.models.families import llama
from quire.models.families.family import Source
from quire.models.spec import ModelSpec

_PARTS = {
    "self_attn.qkv_proj": ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"),
    "mlp.gate_up_proj": ("mlp.up.gate", "mlp.up.up"),
}


def source(
    spec: ModelSpec, name: str, fused: Collection[str], stems: Mapping[str, str] | None = None
) -> Source:
    """Returns the place of a parameter slice: Llama's, or a part of a `fused` tensor."""
    stem, _, tensor = name.rpartition(".")
    for whole in fused if stem.startswith("layers.") else ():
        _, index, part = stem.split(".", 2)
        if part in _PARTS[whole]:
            layer = spec.layers[int(index)]
            mixer, width = cast(AttentionSpec, layer.mixer), cast(Any, layer.ffn).width
            sizes = [width, width]
            if len(_PARTS[whole]) == 3:
                kv = mixer.kv_heads * mixer.head_dim
                sizes = [mixer.heads * mixer.head_dim, kv, kv]
            place = _PARTS[whole].index(part)
            start = sum(sizes[:place])
            span = start, start + sizes[place]
            return Source(f"model.layers.{index}.{whole}.{tensor}", span=span)
    return llama.source(spec, name, stems or {})
