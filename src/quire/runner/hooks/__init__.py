"""Hooks take part in a step beside the model: the sampler's own, and those of features."""

from quire.runner.hooks.hook import GateHook, HeadContext, Hook, HostHook, Level, ProgramHook

__all__ = ["GateHook", "HeadContext", "Hook", "HostHook", "Level", "ProgramHook"]
