"""Profiles of a workload by torch's profiler."""
