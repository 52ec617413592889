"""Measuring how well a model predicts text."""

from quire.tools.evaluate.perplexity import Perplexity, measure_perplexity
from quire.tools.evaluate.text import Window, check_vocabulary, read_text, windows_of

__all__ = [
    "Perplexity",
    "Window",
    "check_vocabulary",
    "measure_perplexity",
    "read_text",
    "windows_of",
]
