"""Samplers that few requests ask for: DRY, XTC, typical-p, and the caller's own functions."""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="samplers",
    order=90,  # After masks, because it draws the tokens of its rows.
    loop="quire.features.samplers.feature:open_samplers",
    hook="quire.features.samplers.hook:open_hook",
    requested=lambda params, options: params.reshapes,
)
