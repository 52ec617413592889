"""The windows of layers, by the patterns of config.json."""

from __future__ import annotations

from quire.models.families import settings


def windows(
    config: settings.Config, layers: int, every: int, width: int | None
) -> tuple[int | None, ...]:
    """Returns each layer's window, by `layer_types`; without it every so many layers one sees
    everything, and those before it have a window of this width."""
    if config.get("layer_types") is None and width is not None:
        every = settings.integer(config, "sliding_window_pattern", every)
        return tuple(width if index % every else None for index in range(1, layers + 1))
    return settings.windows(config, layers, width, first=layers)
