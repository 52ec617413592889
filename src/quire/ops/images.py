"""Ops that bring an encoder's outputs into a step, and their arguments.

A span is the place of an image in a lane: four words. They are the first position of the image, its
number of tokens, its columns of tokens, and the row of its first token among the encoder's outputs.
The row is -1 if the tokens' KV is computed already.
"""

from quire.ops.choose import op
from quire.ops.reference import images
from quire.ops.reference.images import SpanRows

SPAN = 4
"""Words of a span."""

cut_patches = op(images.cut_patches)
resize_columns = op(images.resize_columns)
resize_rows = op(images.resize_rows)
rotate_heads = op(images.rotate_heads)
segment_attention = op(images.segment_attention)
span_rows = op(images.span_rows)

__all__ = [
    "SPAN", "SpanRows", "cut_patches", "resize_columns", "resize_rows",
    "rotate_heads", "segment_attention", "span_rows",
]  # fmt: skip
