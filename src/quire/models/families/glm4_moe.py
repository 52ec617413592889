"""GLM-4.5 and later: a few dense layers, then layers with experts and a shared expert. Half of each
head is rotated (GLM-4.5 Team 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.layers.experts import ExpertsSpec
from quire.models.families import experts, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec
from quire.ops.experts import Routing

_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


def routing(config: settings.Config, count: int) -> Routing:
    """Returns a routing that scores experts with sigmoids and chooses them within groups.

    Raises:
        ModelError: groups differ in size, or the chosen groups have too few experts.
    """
    groups = settings.integer(config, "n_group", 1)
    top_groups = settings.integer(config, "topk_group", 1, high=groups)
    top_k = experts.top_k(config, count, 8)
    if count % groups or top_k > count // groups * top_groups:
        raise ModelError(
            f"config.json: {top_k} of {count} experts cannot be in {top_groups} of {groups} groups"
        )
    return Routing(
        top_k=top_k,
        score="sigmoid",
        renormalize=settings.flag(config, "norm_topk_prob", True),
        scale=settings.number(config, "routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
    )


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({**_DEFAULTS, **config}, "glm4_moe")
    normed = settings.flag(config, "use_qk_norm", False)
    base = llama.with_layers(
        base,
        {
            "qkv_bias": settings.flag(config, "attention_bias", False),
            "qk_norm": base.norm if normed else None,
        },
    )
    count = experts.count(config)
    width = settings.integer(config, "moe_intermediate_size", 1408, high=settings.MOST_FEATURES)
    ffn = ExpertsSpec(
        experts=count,
        width=width,
        routing=routing(config, count),
        correction=True,
        shared_width=width * settings.integer(config, "n_shared_experts", 1, low=0),
    )
    dense = settings.integer(config, "first_k_dense_replace", 1, low=0)
    return experts.with_experts(base, ffn, lambda index: index >= dense)


FAMILY = Family(
    name="glm4_moe",
    spec=_spec,
    source=experts.source(),
    # The MTP layer after the last layer, in both sizes of the model.
    ignored=re.compile(rf"{llama.IGNORED.pattern}|^model\.layers\.(46|92)\."),
    implements=("partial_rotary_factor", "use_qk_norm", *experts.COUNTS),
)
