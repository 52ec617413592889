"""Tenants (API keys) that share an engine: turns, lanes and blocks by weight, short waits."""

from quire.scheduler.fair_share.fair_share import FairShare

__all__ = ["FairShare"]
