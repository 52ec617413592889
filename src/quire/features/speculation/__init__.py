"""Speculative decoding: cheap drafts of several tokens, which one step of the model verifies.

- `settings.py` reads the users' settings.
- `lookup.py` finds drafts on the host: continuations of similar texts, or of the prefix tree.
- `draft_model.py` drafts with a second model on the device.
- `draft_head.py` drafts with layers that read the target's hidden states.
- `drafter.py` is the common base of these two.
- `draft_count.py` decides how many drafts each row verifies.
- `feature.py` follows the running requests, and brings drafts into plans.
- `device_source.py` writes the entries of plans for the drafter on the device.

Drafts never change the generated tokens (`StepPlan`), only the speed.
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
