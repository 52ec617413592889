"""Kinds of drafts, by source, and the settings of speculation. Each kind has its own acceptance
rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.arrays import Int32, int32
from quire.config import QUANTIZATIONS, EngineArgs
from quire.errors import ConfigError, ModelError
from quire.features.speculation.draft_count import Flags
from quire.layers.gated_delta import GatedDeltaSpec
from quire.models import ModelSpec, load_config, resolve_model_path, spec_from_config
from quire.models.draft_heads.eagle3 import eagle3_spec, is_eagle3
from quire.models.draft_heads.mtp import check_mtp, mtp_layers

NONE, DEVICE, MASKED, TREE, LOOKUP = range(5)
"""Kinds of drafts.

- NONE: No drafts.
- DEVICE: From the source on the device.
- MASKED: The same, for rows under a grammar. The source does not know the grammar.
- TREE: From a text in the prefix tree that begins with the row's whole text.
- LOOKUP: From a text that matches the row's end. Each class of match lengths is a kind.
"""

_CLASSES = int32([2, 3, 4, 6, 8, 12, 16, 24])
"""The least length of each class but the first."""
NUM_KINDS = LOOKUP + len(_CLASSES) + 1


def lookup_kind(length: int) -> int:
    """Returns the kind of drafts from a match of `length` tokens."""
    return LOOKUP + int(np.searchsorted(_CLASSES, length, side="right"))


def by_device(kinds: Int32) -> Flags:
    """Returns which kinds of drafts the source on the device makes, bool [n]."""
    found: Flags = (kinds == DEVICE) | (kinds == MASKED)
    return found


# The settings of speculation, as a dict or as JSON.

METHODS = ("auto", "draft", "eagle3", "mtp", "suffix")
MOST_DRAFTS = 16
AUTO_DRAFTS = 7
"""A row of eight tokens is the longest that the kernels for short rows take."""

_KEYS = (
    "method", "model", "num_speculative_tokens", "lookup_min", "lookup_max", "quantization",
    "simulate_acceptance",
)  # fmt: skip
Source = Literal["draft", "eagle3", "mtp"]
"""Sources of drafts on the device: a model, or a draft head."""
_LOOKUP = 2, 16
_LONGEST_LOOKUP = 64
_EMBEDDED: dict[str, tuple[Source, str]] = {
    "auto": ("draft", "quire-tiny-draft"),
    "draft": ("draft", "quire-tiny-draft"),
    "eagle3": ("eagle3", "quire-tiny-eagle3"),
}
"""Sources of drafts for the embedded model, and their folders beside its own, by method."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Checked settings of speculation.

    Attributes:
        source: Drafter on the device; None: no drafter.
        model: Folder of the draft model or the EAGLE-3 head.
        lookup: Whether texts are searched for drafts.
        most: Most drafts of a row.
        lookup_min: Fewest matching tokens for a draft from a text.
        lookup_max: Most tokens to compare.
        quantization: Quantization of the draft model.
        simulated: Probability of accepting a draft, for benchmarks of random weights. None: the
            model decides.
    """

    source: Source | None
    model: Path | None
    lookup: bool
    most: int = AUTO_DRAFTS
    lookup_min: int = _LOOKUP[0]
    lookup_max: int = _LOOKUP[1]
    quantization: str | None = None
    simulated: float | None = None


def read_settings(args: EngineArgs) -> SpeculationSettings:
    """Returns the settings of an engine that speculates.

    Raises:
        ConfigError: a key is unknown, a value wrong, or the two forms contradict each other.
        ModelError: there is no such draft model.
    """
    given = dict(args.speculative or {})
    for key in given:
        if key not in _KEYS:
            raise _wrong(f"has no key {key!r}; its keys are {', '.join(_KEYS)}")
    if args.speculative_model is not None:
        if given.get("model", args.speculative_model) != args.speculative_model:
            raise ConfigError("speculative names another model", "speculative_model")
        given["model"] = args.speculative_model
    method = given.get("method", "auto")
    if method not in METHODS:
        raise _wrong(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    name = given.get("model")
    if name is not None and (not isinstance(name, str) or not name):
        raise _wrong(f"model must be a folder or hub id, got {name!r}")
    if method in ("suffix", "mtp") and name is not None:
        raise _wrong(f"method {method} takes no model")
    low = _integer(given, "lookup_min", _LOOKUP[0], 1, _LONGEST_LOOKUP)
    high = _integer(given, "lookup_max", max(low, _LOOKUP[1]), low, _LONGEST_LOOKUP)
    quantization = given.get("quantization")
    if quantization is not None and not (
        isinstance(quantization, str) and set(quantization.split(",")) <= set(QUANTIZATIONS)
    ):
        names = ", ".join(QUANTIZATIONS)
        raise _wrong(f"quantization must be one of {names}, got {quantization!r}")
    source, model = _source(args, method, name)
    if quantization is not None and source != "draft":
        raise _wrong("quantization is that of a draft model, and there is none")
    return SpeculationSettings(
        source=source,
        model=model,
        lookup=method in ("auto", "suffix"),
        most=_drafts(given),
        lookup_min=low,
        lookup_max=high,
        quantization=quantization,
        simulated=_simulated(given),
    )


def check_settings(args: EngineArgs, target: ModelSpec, device: str = "") -> None:
    """Checks that the settings fit the target model.

    Raises:
        ConfigError, ModelError: as `read_settings`; the draft model has another vocabulary, fewer
            positions, or recurrent layers; the draft head is not there, or of another model.
    """
    settings = read_settings(args)
    if not settings.most:
        return
    longest = args.max_model_len or target.max_positions
    if settings.source == "mtp":
        check_mtp(resolve_model_path(args.model, args.revision), target, args.load_format)
    elif settings.source == "eagle3" and settings.model is not None:
        eagle3_spec(load_config(settings.model), target)
    elif settings.source == "draft" and settings.model is not None:
        _check_draft(spec_from_config(load_config(settings.model)), target, longest)


def _check_draft(draft: ModelSpec, target: ModelSpec, longest: int) -> None:
    if any(isinstance(layer.mixer, GatedDeltaSpec) for layer in draft.layers):
        raise _wrong("a draft model with recurrent layers is not supported")
    if draft.vocab_size != target.vocab_size:
        raise _wrong(
            f"the draft model's vocabulary has {draft.vocab_size} tokens, the model's "
            f"{target.vocab_size}: they must be the same"
        )
    if draft.max_positions < longest:
        raise _wrong(
            f"the draft model was made for {draft.max_positions} positions, but max_model_len is "
            f"{longest}"
        )


def _source(args: EngineArgs, method: str, name: str | None) -> tuple[Source | None, Path | None]:
    """Returns the source of drafts on the device, and its folder.

    If the method does not decide, the kind of model in the folder decides. Without a model it is
    the target's MTP layer, if it has one.
    """
    if method == "suffix":
        return None, None
    if method == "mtp":
        return "mtp", None
    if name is not None:
        path = resolve_model_path(name)
        head = _is_eagle3(path)
        if method == "draft" and head:
            raise _wrong("method draft needs a draft model, but the model is an EAGLE-3 head")
        return ("eagle3" if method == "eagle3" or head else "draft"), path
    if args.model is None:
        source, folder = _EMBEDDED[method]
        return source, resolve_model_path(None).parent / folder
    if method == "eagle3":
        raise _wrong("method eagle3 needs a model, the folder or hub id of the head")
    if method == "draft":
        raise _wrong("method draft needs a model")
    return ("mtp" if _has_mtp(args) else None), None


def _is_eagle3(folder: Path) -> bool:
    return is_eagle3(load_config(folder))


def _has_mtp(args: EngineArgs) -> bool:
    """Returns whether the target's checkpoint has an MTP layer."""
    folder = resolve_model_path(args.model, args.revision)
    config = load_config(folder)
    target = spec_from_config(config)
    if not mtp_layers(config, target):
        return False
    try:
        check_mtp(folder, target, args.load_format)
    except ModelError:
        return False
    return True


def _drafts(given: Mapping[str, Any]) -> int:
    if given.get("num_speculative_tokens", "auto") == "auto":
        return AUTO_DRAFTS
    return _integer(given, "num_speculative_tokens", 0, 0, MOST_DRAFTS)


def _simulated(given: Mapping[str, Any]) -> float | None:
    value = given.get("simulate_acceptance")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0.0 <= value <= 1.0):
        raise _wrong(f"simulate_acceptance must be a number from 0 to 1, got {value!r}")
    return None if value is None else float(value)


def _integer(given: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        more = " or auto" if key == "num_speculative_tokens" else ""
        raise _wrong(f"{key} must be an integer from {low} to {high}{more}, got {value!r}")
    return value


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"speculative: {what}", "speculative")
