"""Products whose sums have an order that does not depend on the number of ranks.

The inputs of the layer are cut into segments. Each segment is summed by itself; then neighbouring
sums are added in pairs."""

from quire.ops.choose import op
from quire.ops.reference import segments as reference

add_pairs = op(reference.add_pairs)
segment_sum = op(reference.segment_sum)
expert_segments = op(reference.expert_segments)

__all__ = ["add_pairs", "expert_segments", "segment_sum"]
