"""DeepSeek-V2 Lite: latent attention, experts chosen by softmax (DeepSeek-AI 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.layers.experts import ExpertsSpec
from quire.models.families import deepseek_v3, experts, known_values, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing

_KNOWN: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    # Published models with normalized weights use another router, which is not supported.
    "norm_topk_prob": (False,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
}


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    known_values.check(config, _KNOWN)
    base = deepseek_v3.base_spec(config, "deepseek_v2")
    count = experts.count(config)
    width = settings.integer(config, "moe_intermediate_size", high=settings.MOST_FEATURES)
    ffn = ExpertsSpec(
        experts=count,
        width=width,
        routing=Routing(
            top_k=experts.top_k(config, count),
            renormalize=False,
            scale=settings.number(config, "routed_scaling_factor", 1.0),
        ),
        shared_width=width * settings.integer(config, "n_shared_experts", 2, low=0),
    )
    dense = settings.integer(config, "first_k_dense_replace", 0, low=0)
    return experts.with_experts(base, ffn, lambda index: index >= dense)


FAMILY = Family(
    name="deepseek_v2",
    spec=_spec,
    source=deepseek_v3.source,
    ignored=llama.IGNORED,
    implements=deepseek_v3.IMPLEMENTS,
)
