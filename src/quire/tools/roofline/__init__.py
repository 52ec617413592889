"""Predicted times, and how far measurements are from them."""
