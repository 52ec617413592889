"""Copies of experts on several ranks, placed by how often tokens choose each."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="expert_balance",
    order=50,
    args="quire.features.expert_balance.args:BalanceArgs",
    loop="quire.features.expert_balance.feature:Balance",
    hook="quire.features.expert_balance.hook:BalanceHook",
    check="quire.features.expert_balance.args:check_settings",
    enabled=lambda args: args.redundant_experts != 0,
    stats="quire.features.expert_balance.stats:ExpertStats",
    stats_name="experts",
    live_rows="quire.features.expert_balance.stats:LIVE_ROWS",
    metrics="quire.features.expert_balance.metrics:collect",
)
