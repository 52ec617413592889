"""The runner's part: the hook that applies masks, with the settings of structured output."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.features.structured_output.args import StructuredOutputArgs
from quire.layers.gated_delta import GatedDeltaSpec
from quire.models import load_config, spec_from_config
from quire.runner.hooks.mask import Mask

FORCED_DRAFTS = 7
"""A row of eight tokens is the longest that the kernels for short rows take."""


def open_mask(config: EngineConfig) -> Mask:
    """Returns the hook of an engine."""
    wait_us = StructuredOutputArgs.of(config.args).structured_outputs_wait_us
    return Mask(config, drafts=forced_drafts(config), patience_us=wait_us)


def forced_drafts(config: EngineConfig) -> int:
    """Returns the most forced tokens of a row that a step computes besides its own."""
    given = StructuredOutputArgs.of(config.args).structured_outputs_drafts
    if given is not None:
        return given
    if config.args.pipeline_parallel_size > 1 or config.device == "cpu" or config.eager:
        return 0
    spec = spec_from_config(load_config(Path(config.model_path)))
    # A recurrent state would have to keep what leads back behind any draft.
    recurrent = any(isinstance(layer.mixer, GatedDeltaSpec) for layer in spec.layers)
    return 0 if recurrent else FORCED_DRAFTS
