"""Mistral 7B and its successors: Llama with a sliding window (Jiang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec(config, "mistral")
    # The first release wrote `sliding_window_size`. A config without either key means 4096. Only an
    # explicit null, as in later releases, switches the window off.
    name = "sliding_window" if "sliding_window" in config else "sliding_window_size"
    off = name in config and config[name] is None
    width = None if off else settings.integer(config, name, 4096)
    windows = settings.windows(config, len(base.layers), width, first=0)
    return llama.with_layers(base, {}, windows=windows)


FAMILY = Family(
    name="mistral",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
