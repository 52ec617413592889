"""Quantized checkpoints, made from unquantized ones."""

from quire.tools.quantize.quantize import GATE, GateError, Options, quantize
from quire.tools.quantize.recipe import METHODS, Recipe
from quire.tools.quantize.report import Report

__all__ = ["GATE", "METHODS", "GateError", "Options", "Recipe", "Report", "quantize"]
