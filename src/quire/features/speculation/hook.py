"""Opens the runner's side of speculation, depending on the source of drafts on the device."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.features.speculation.draft_head import HeadDrafter
from quire.features.speculation.draft_model import DraftModel
from quire.features.speculation.settings import read_settings
from quire.features.speculation.verifier import EarlierVerifier, Verifier
from quire.runner import Hook


def open_hook(config: EngineConfig) -> Hook:
    """Returns the hook of a worker."""
    settings = read_settings(config.args)
    if settings.source is None or not settings.most:
        return Verifier(settings)
    if settings.source == "draft":
        return DraftModel(config, settings)
    return HeadDrafter(config, settings)


def open_earlier_hook(config: EngineConfig) -> Hook:
    """Returns the hook of a worker in a pipeline stage before the last, which makes no drafts."""
    return EarlierVerifier(read_settings(config.args))
