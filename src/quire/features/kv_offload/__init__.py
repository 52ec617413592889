"""KV offload: keeps evicted KV blocks in host memory and in files, and copies them back if that is
faster than computing them again."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="kv_offload",
    order=20,
    args="quire.features.kv_offload.args:OffloadArgs",
    loop="quire.features.kv_offload.loop:OffloadLoop",
    hook="quire.features.kv_offload.hook:OffloadHook",
    enabled=lambda args: args.host_cache_gb > 0.0,
    check="quire.features.kv_offload.args:check_settings",
    stats="quire.features.kv_offload.stats:TierStats",
    stats_name="tiers",
    live_rows="quire.features.kv_offload.stats:LIVE_ROWS",
    metrics="quire.features.kv_offload.metrics:collect",
)
