"""Metrics, traces, logs and live snapshots of the engine."""
