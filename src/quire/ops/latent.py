"""The ops of latent attention, which few models have."""

from quire.ops.choose import op
from quire.ops.reference import latent as reference

latent_attention = op(reference.latent_attention)
latent_most_skew = op(reference.latent_most_skew)
latent_queries = op(reference.latent_queries)
latent_schedule = op(reference.latent_schedule)
latent_values = op(reference.latent_values)
store_latent = op(reference.store_latent)

__all__ = [
    "latent_attention", "latent_most_skew", "latent_queries", "latent_schedule", "latent_values",
    "store_latent",
]  # fmt: skip
