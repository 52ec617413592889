"""Quantized checkpoints, made from unquantized ones."""

from quire.compression.quantize import GATE, GateError, Options, quantize
from quire.compression.recipe import METHODS, Recipe
from quire.compression.report import Report

__all__ = ["GATE", "METHODS", "GateError", "Options", "Recipe", "Report", "quantize"]
