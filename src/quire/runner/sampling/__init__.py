"""From logits to tokens, all on the device."""

from quire.runner.sampling.sampler import HeadKind, Sampler

__all__ = ["HeadKind", "Sampler"]
