"""Plans of linear layers, measured for a model's own shapes while its engine is idle."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="tuning",
    order=70,
    args="quire.features.tuning.args:TuningArgs",
    loop="quire.features.tuning.settings:open_tuning",
    enabled=lambda args: args.tune_tables == "on",
    serving="quire.features.tuning.settings:served",
)
