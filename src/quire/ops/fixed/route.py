"""The choice of experts."""

from __future__ import annotations

from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.experts import ExpertCopies, Routed, Routing
from quire.ops.fixed.products import products, wider
from quire.ops.reference import smooth
from quire.ops.reference.dense import rms_norm
from quire.ops.reference.experts import choose


def route(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    live: Tensor,
    norm: RmsScale | None = None,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
    copies: ExpertCopies | None = None,
) -> Routed:
    """See `reference.experts.route`."""
    if norm is not None:
        x = rms_norm(x, *norm)
    wide = wider(x.dtype)
    logits = products(x.to(wide), weight.to(wide))
    if bias is not None:
        logits += bias
    scores = logits.softmax(1) if routing.score == "softmax" else smooth.sigmoid(logits)
    end = len(weight) - first if count is None else count
    return choose(x, scores, routing, live, correction, first, end, copies)
