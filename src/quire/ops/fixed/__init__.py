"""Ops on a CPU whose results depend on a token's own request alone, to the bit (`--deterministic`).

Libraries of linear algebra choose the order of a sum by the shape of a product, so products here
all have one shape; and a vector of PyTorch's holds other numbers at its end than in its middle, so
functions are composed of those for which that makes no difference. Ops that are not here have that
property as they are.
"""

from quire.ops.fixed.attention import paged_attention
from quire.ops.fixed.dense import activate, linear, route
from quire.ops.fixed.latent import latent_attention, latent_queries, latent_values

__all__ = [
    "activate",
    "latent_attention",
    "latent_queries",
    "latent_values",
    "linear",
    "paged_attention",
    "route",
]
