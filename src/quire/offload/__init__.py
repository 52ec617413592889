"""KV blocks that the device has no room for: kept in the host's memory and in files, and brought
back where that is cheaper than computing them again."""

from quire.offload.costs import CostModel, Rates
from quire.offload.feature import OffloadFeature, TierStats
from quire.offload.loop import OffloadLoop

__all__ = ["CostModel", "OffloadFeature", "OffloadLoop", "Rates", "TierStats"]
