"""Samplers that few requests ask for: DRY, XTC, typical-p and functions of the caller's."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="samplers",
    order=90,  # behind masks: it draws the tokens of its rows
    loop="quire.features.samplers.feature:open_samplers",
    hook="quire.features.samplers.hook:open_hook",
    requested=lambda params, options: params.reshapes,
)
