"""GLM-4.7 Flash: the experts of GLM-4.5 with latent attention (Z.ai 2026)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.families import deepseek_v3, experts, known_values, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_KINDS = "dense", "sparse"


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    known_values.check(config, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    base = deepseek_v3.base_spec({"rms_norm_eps": 1e-5, **config}, "glm4_moe_lite")
    sparse = _sparse(config, len(base.layers))
    ffn = deepseek_v3.experts_spec(config)
    return experts.with_experts(base, ffn, lambda index: sparse[index])


def _sparse(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Returns, for each layer, whether it has experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense = settings.integer(config, "first_k_dense_replace", 1, low=0)
        return [index >= dense for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in _KINDS for k in kinds):
        raise ModelError(
            f"config.json: mlp_layer_types must give each of {layers} layers one of: "
            f"{', '.join(_KINDS)}"
        )
    return [kind == "sparse" for kind in kinds]


FAMILY = Family(
    name="glm4_moe_lite",
    spec=_spec,
    source=deepseek_v3.source,
    # The MTP layer after the last layer.
    ignored=re.compile(rf"{llama.IGNORED.pattern}|^model\.layers\.47\."),
    implements=deepseek_v3.IMPLEMENTS,
)
