"""From logits to tokens, all on the device."""

from quire.runner.sampling.sampler import Sampler

__all__ = ["Sampler"]
