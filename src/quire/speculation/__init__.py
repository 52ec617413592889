"""Speculative decoding: tokens are drafted cheaply and verified several at once, in one step.

`settings.py` reads what users ask for. Two sources draft: `lookup.py` finds how the text went on
where it stood before, on the host; `hook.py` runs a second model, on the device. `draft_count.py`
decides how many drafts each row verifies; `feature.py` follows the running requests and brings
drafts into plans. What a draft says never changes a token (`StepPlan`), so all of this is about
speed alone.
"""

from quire.speculation.feature import SpeculationFeature, open_speculation

__all__ = ["SpeculationFeature", "open_speculation"]
