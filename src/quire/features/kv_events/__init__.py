"""KV events tell routers which prefixes an engine's cache holds, and the engine's load."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="kv_events",
    order=110,
    loop="quire.features.kv_events.feature:open_events",
    serves=True,
    calls="quire.features.kv_events.calls:CALLS",
    routes="quire.features.kv_events.api:ROUTES",
)
