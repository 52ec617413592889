"""Ops on a CPU whose results depend on a token's own request alone, to the bit (`--deterministic`).

Linear algebra libraries choose the order of a sum by the shape of a product. So all products here
have one shape. PyTorch uses other code for the end of a vector than for its middle. So functions
here use only operations whose results are the same with both. The reference ops that this package
does not replace have this property already."""

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
