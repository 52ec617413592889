"""Qwen3.5 with experts: Qwen3-Next with other stacked tensors (Qwen Team 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import qwen3_5, qwen3_next, qwen_vision
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    # No layer is dense, so configs have no `intermediate_size`.
    base = qwen3_next.base_spec({"intermediate_size": 1, **config}, "qwen3_5_moe")
    given = {"num_experts": 256, "num_experts_per_tok": 8, **config}
    return qwen3_5.in_sections(qwen3_next.with_experts(base, given, "each"), config)


FAMILY = Family(
    name="qwen3_5_moe",
    spec=_spec,
    source=qwen3_next.stacked_source,
    prefixes=qwen3_next.PREFIXES,
    ignored=qwen3_next.IGNORED,
    implements=qwen3_5.IMPLEMENTS,
    vision=qwen_vision.QWEN3,
)
