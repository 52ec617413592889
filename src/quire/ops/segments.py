"""Sums over the inputs of a layer that ranks share, in an order that does not depend on how many
ranks there are: segments of the inputs are summed by themselves, and then in pairs of neighbours.
"""

from quire.ops.choose import op
from quire.ops.reference import segments as reference

add_pairs = op(reference.add_pairs)
segment_sum = op(reference.segment_sum)
expert_segments = op(reference.expert_segments)

__all__ = ["add_pairs", "expert_segments", "segment_sum"]
