"""Kernels of images: pixels to patches, a tower's layers, and its outputs in a step."""
