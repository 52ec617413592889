"""Draft heads: layers that draft tokens from another model's hidden states.

`mtp.py` has the layer that some models contain to predict one more token. `eagle3.py` has heads
that are trained for a finished model. Both are `DraftHead`s.
"""

from quire.models.draft_heads.draft_head import DraftHead

__all__ = ["DraftHead"]
