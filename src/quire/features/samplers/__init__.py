"""Samplers that few requests ask for: DRY, XTC, typical-p and functions of the caller's."""

from quire.features.samplers.feature import SamplersFeature, open_samplers

__all__ = ["SamplersFeature", "open_samplers"]
