"""The model runner: one device's model, batch state, and the programs of a step."""

from quire.runner.hooks import Hook
from quire.runner.model_runner import ModelRunner

__all__ = ["Hook", "ModelRunner"]
