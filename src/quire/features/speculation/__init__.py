"""Speculative decoding: tokens are drafted cheaply and verified several at once, in one step.

`settings.py` reads what users ask for. On the host, `lookup.py` finds how the text went on where it
stood before, and the prefix tree how texts that begin alike did. On the device, `draft_model.py`
runs a second model, or `draft_head.py` layers that go on from the target's hidden states; both are
a `drafter.py`. `draft_count.py` decides how many drafts each row verifies; `feature.py` follows the
running requests and brings drafts into plans, `device_source.py` what the device needs to know.
What a draft says never changes a token (`StepPlan`), so all of this is about speed alone.
"""

from quire.features.spec import FeatureSpec
from quire.features.speculation.args import SpeculationArgs

FEATURE = FeatureSpec(
    name="speculation",
    order=40,
    args="quire.features.speculation.args:SpeculationArgs",
    loop="quire.features.speculation.feature:open_speculation",
    hook="quire.features.speculation.hook:open_hook",
    enabled=lambda args: SpeculationArgs.of(args).enabled,
    whole_steps="speculation: draft heads read whole steps between layers",
    own_logits=True,
    earlier_hook="quire.features.speculation.hook:open_earlier_hook",
    check="quire.features.speculation.settings:check_settings",
    stats="quire.features.speculation.stats:SpeculationStats",
    stats_name="speculation",
    live_rows="quire.features.speculation.stats:LIVE_ROWS",
    metrics="quire.features.speculation.metrics:collect",
)
