"""Sums and gathers over ranks."""
