"""Weights that change under a running engine, and an engine that sleeps.

`hook.py` writes an update on every rank, `feature.py` decides when, and `open_sources.py` opens
what an update brings. `api/` has the routes that trainers call.
"""

from quire.features.spec import FeatureSpec

_HERE = "quire.features.weight_updates"

FEATURE = FeatureSpec(
    name="weight_updates",
    order=10,
    args=f"{_HERE}.args:WeightUpdateArgs",
    enabled=lambda args: args.enable_sleep_mode,
    requested=lambda params, options: False,
    loop=f"{_HERE}.feature:WeightUpdates",
    hook=f"{_HERE}.hook:UpdateHook",
    earlier_hook=f"{_HERE}.hook:UpdateHook",
    methods={name: f"{_HERE}.offline:{name}" for name in ("update_weights", "sleep", "wake_up")},
    calls=f"{_HERE}.calls:CALLS",
    routes=f"{_HERE}.api:ROUTES",
    stats=f"{_HERE}.stats:UpdateStats",
    stats_name="weight_updates",
    live_rows=f"{_HERE}.stats:LIVE_ROWS",
    metrics=f"{_HERE}.metrics:collect",
)
