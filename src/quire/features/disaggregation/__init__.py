"""Prefill and decode in different engines: prompts are computed by one, their KV goes to another.

The reader (role decode) asks over HTTP for a prompt, and gets a grant. It then fetches the blocks
over a connection of the grant's own, into its prefix tree, where the request finds them.
"""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="disaggregation",
    order=30,
    args="quire.features.disaggregation.args:DisaggArgs",
    loop="quire.features.disaggregation.loop:DisaggLoop",
    hook="quire.features.disaggregation.layer_clock:open_hook",
    enabled=lambda args: args.kv_peers is not None,
    calls="quire.features.disaggregation.calls:CALLS",
    routes="quire.features.disaggregation.api:ROUTES",
    fields="quire.features.disaggregation.calls:FIELDS",
    stats="quire.features.disaggregation.stats:DisaggStats",
    stats_name="disagg",
    metrics="quire.features.disaggregation.metrics:collect",
)
