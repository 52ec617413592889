"""The runner's part: the hook that applies masks, with the settings of structured output."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.features.structured_output.args import StructuredOutputArgs, mask_processes
from quire.runner.hooks.mask import Mask


def open_mask(config: EngineConfig) -> Mask:
    """Returns the hook of an engine."""
    args = StructuredOutputArgs.of(config.args)
    return Mask(
        config,
        drafts=args.structured_outputs_drafts,
        patience_us=args.structured_outputs_wait_us,
        remote=mask_processes(args, config.device) > 0,
    )
