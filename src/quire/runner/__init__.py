"""The body: applies plans to device state, runs the model, samples."""

from quire.runner.hook import Hook
from quire.runner.model_runner import ModelRunner

__all__ = ["Hook", "ModelRunner"]
