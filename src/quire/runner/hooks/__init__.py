"""Hooks take part in a step beside the model: the sampler's own, and those of features."""

from quire.runner.hooks.hook import HeadContext, Hook, Level

__all__ = ["HeadContext", "Hook", "Level"]
