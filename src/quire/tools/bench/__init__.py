"""Benchmarks, and the one schema of their records."""
