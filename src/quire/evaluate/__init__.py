"""Measuring how well a model predicts text."""

from quire.evaluate.perplexity import Perplexity, measure_perplexity
from quire.evaluate.text import Window, read_text, windows_of

__all__ = ["Perplexity", "Window", "measure_perplexity", "read_text", "windows_of"]
