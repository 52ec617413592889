"""Qwen3 with experts, Qwen3-Coder among them (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.layers.expert_weights import Layout
from quire.layers.experts import ExpertsSpec
from quire.models.families import experts, known_values, llama, qwen3, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing

_KNOWN: dict[str, tuple[Any, ...]] = {
    "qkv_bias": (False,),
    "shared_expert_intermediate_size": (0,),
    "use_qk_norm": (True,),
}
"""Supported values of keys in configs of Qwen3-Coder. Published code computes no others."""


def spec(
    config: Mapping[str, Any], family: str = "qwen3_moe", layout: Layout = "each"
) -> ModelSpec:
    """Returns a Qwen3 with experts.

    Args:
        config: its config.json.
        family: the family's name.
        layout: layout of the experts in the checkpoint.
    """
    known_values.check(config, _KNOWN)
    # Without `head_dim` the head size follows from the hidden size, unlike in dense Qwen3.
    hidden = settings.integer(config, "hidden_size", high=settings.MOST_FEATURES)
    base = qwen3.spec({**config, "head_dim": settings.heads(config, hidden)[2]}, family)
    count = experts.count(config)
    ffn = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "moe_intermediate_size", 768, high=settings.MOST_FEATURES),
        routing=Routing(
            top_k=experts.top_k(config, count, 8),
            renormalize=settings.flag(config, "norm_topk_prob", False),
        ),
        layout=layout,
    )
    step = settings.integer(config, "decoder_sparse_step", 1)
    dense = experts.indices(config, "mlp_only_layers")
    return experts.with_experts(
        base, ffn, lambda index: index not in dense and (index + 1) % step == 0
    )


FAMILY = Family(
    name="qwen3_moe",
    spec=spec,
    source=experts.source(),
    ignored=llama.IGNORED,
    implements=("layer_types", "use_qk_norm", *experts.COUNTS),
)
