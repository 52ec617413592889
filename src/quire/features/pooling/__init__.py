"""One vector per prompt instead of tokens: the scheduler's side and the runner's."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="pooling",
    order=10,
    args="quire.features.pooling.args:PoolingArgs",
    loop="quire.features.pooling.feature:open_pooling",
    hook="quire.features.pooling.hook:open_pooler",
    config="quire.features.pooling.model_settings:embedding_settings",
    requested=lambda params, options: options.get("pooling") is not None,
    fields="quire.features.pooling.fields:FIELDS",
)
