"""Seed-OSS: Llama with biases on q, k and v (ByteDance 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({"head_dim": 128, **config}, "seed_oss")
    mixer = {
        "qkv_bias": settings.flag(config, "attention_bias", True),
        "out_bias": settings.flag(config, "attention_out_bias", False),
    }
    return llama.with_layers(base, mixer, {"bias": settings.flag(config, "mlp_bias", False)})


FAMILY = Family(name="seed_oss", spec=_spec, source=llama.source, ignored=llama.IGNORED)
