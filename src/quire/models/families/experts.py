"""Helpers for families with experts: sizes in config.json and names of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.experts import ExpertsSpec
from quire.models.families import llama, settings
from quire.models.families.family import Source
from quire.models.spec import ModelSpec

MOST_EXPERTS = 4096
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that have held the number of experts in different versions of config.json."""

_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.(up|down)\.(\d+)(?:\.(gate|up))?\.(.+)")
_ROUTER = re.compile(r"layers\.(\d+)\.mlp\.router\.(.+)")
_FUSED = re.compile(r"layers\.(\d+)\.mlp\.(up|down)(?:\.(?:gate|up))?\.([^.]+)")
_FUSED_STEMS = {"up": "gate_up_proj", "down": "down_proj"}
_SHARED = re.compile(r"layers\.(\d+)\.mlp\.shared\.(.+)\.([^.]+)")
_SHARED_STEMS = {"up.gate": "gate_proj", "up.up": "up_proj", "down": "down_proj"}


def count(config: settings.Config) -> int:
    """Returns the number of experts.

    Raises:
        ModelError: the number is missing or invalid, or several keys hold different numbers.
    """
    given = {name: config[name] for name in COUNTS if config.get(name) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise ModelError(f"config.json: different numbers of experts: {given}")
    name = next(iter(given), COUNTS[0])
    return settings.integer(given, name, high=MOST_EXPERTS)


def top_k(config: settings.Config, experts: int, default: int | None = None) -> int:
    """Returns the number of experts per token.

    Raises:
        ModelError: it is larger than the number of experts.
    """
    return settings.integer(config, "num_experts_per_tok", default, high=experts)


def with_experts(spec: ModelSpec, experts: ExpertsSpec, sparse: Callable[[int], bool]) -> ModelSpec:
    """Returns the spec with experts in the layers for whose index `sparse` returns True."""
    layers = [
        replace(layer, ffn=experts) if sparse(index) else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def source(
    block: str = "mlp",
    names: Mapping[str, str] | None = None,
    correction: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
) -> Callable[[ModelSpec, str], Source]:
    """Returns the `Family.source` of a Llama with experts, in the layout "each", "fused" or
    "transposed".

    Args:
        block: name of the layer's feed-forward part.
        names: names of an expert's gate, up and down projections.
        correction: tensor of `Router.correction`.
        shared: name of the shared expert.
    """
    stems = names or {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

    def find(spec: ModelSpec, name: str) -> Source:
        if found := _EXPERT.fullmatch(name):
            index, part, expert, stem, tensor = found.groups()
            own = stems[stem or part]
            return Source(f"model.layers.{index}.{block}.experts.{expert}.{own}.{tensor}")
        if found := _ROUTER.fullmatch(name):
            index, tensor = found.groups()
            own = correction if tensor == "correction" else f"gate.{tensor}"
            return Source(f"model.layers.{index}.{block}.{own}")
        if found := _SHARED.fullmatch(name):
            index, stem, tensor = found.groups()
            own = f"_gate.{tensor}" if stem == "gate" else f".{_SHARED_STEMS[stem]}.{tensor}"
            return Source(f"model.layers.{index}.{block}.{shared}{own}")
        if (found := _FUSED.fullmatch(name)) and _is_fused(spec, int(found[1])):
            index, part, tensor = found.groups()
            behind = "" if tensor == "weight" else f"_{tensor}"
            own = f"{_FUSED_STEMS[part]}{behind}"
            return Source(f"model.layers.{index}.{block}.experts.{own}")
        return llama.source(spec, name)

    return find


def _is_fused(spec: ModelSpec, index: int) -> bool:
    ffn = spec.layers[index].ffn
    return isinstance(ffn, ExpertsSpec) and ffn.layout in ("fused", "transposed")


def indices(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns a list of layer indices from config.json, by default an empty one."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise ModelError(f"config.json: {name} must be a list of layers, got {value!r}")
    return tuple(value)
