"""What takes part in a step beside the model: the sampler's own hooks, and features'."""

from quire.runner.hooks.hook import HeadContext, Hook, Level

__all__ = ["HeadContext", "Hook", "Level"]
