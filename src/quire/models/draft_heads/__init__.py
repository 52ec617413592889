"""Draft heads: layers that draft tokens from another model's hidden states.

`mtp.py` has the layer that some models bring along to predict a further token, `eagle3.py` heads
that were trained for a model afterwards. Both are a `DraftHead`.
"""

from quire.models.draft_heads.draft_head import DraftHead

__all__ = ["DraftHead"]
