"""Pooling: requests that get one vector for their prompt instead of tokens."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="pooling",
    order=10,
    args="quire.features.pooling.args:PoolingArgs",
    loop="quire.features.pooling.feature:open_pooling",
    hook="quire.features.pooling.hook:open_pooler",
    config="quire.features.pooling.model_settings:embedding_settings",
    needed=lambda config: config.encoder,
    requested=lambda params, options: options.get("pooling") is not None,
    fields="quire.features.pooling.fields:FIELDS",
)
