"""Prefill and decode in different engines: one computes prompts, and another takes their KV.

The reader (role decode) asks another engine over HTTP to compute a prompt, and gets a grant. It
then fetches the blocks over a separate connection for this grant into its prefix tree, where the
request finds them.
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
    live_rows="quire.features.disaggregation.stats:LIVE_ROWS",
    metrics="quire.features.disaggregation.metrics:collect",
)
