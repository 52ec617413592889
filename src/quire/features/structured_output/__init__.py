"""Structured output: a grammar that a completion must match, as a mask over the vocabulary at every
token.

`quire.grammar.grammar` turns a request's `StructuredOutputsParams` into a grammar of llguidance's,
and refuses what it could not enforce. `feature.py` hands each request to a builder when it arrives.
The builder compiles the grammar (`compiler.py`), and builds masks beside the device's work.
"""

from quire.features.spec import FeatureSpec

FEATURE = FeatureSpec(
    name="structured_output",
    order=80,  # behind drafts: masks of their positions need what others have written
    args="quire.features.structured_output.args:StructuredOutputArgs",
    loop="quire.features.structured_output.feature:open_grammars",
    hook="quire.features.structured_output.hook:open_mask",
    stats="quire.features.structured_output.stats:GrammarStats",
    stats_name="grammars",
    live_rows="quire.features.structured_output.stats:LIVE_ROWS",
    metrics="quire.features.structured_output.metrics:collect",
    calls="quire.features.structured_output.calls:CALLS",
    enabled=lambda args: bool(args.structured_outputs_drafts),
    requested=lambda params, options: params.masked,
)
