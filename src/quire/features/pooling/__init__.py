"""One vector per prompt instead of tokens: the scheduler's side and the runner's."""

from quire.features.pooling.feature import PoolingFeature, open_pooling

__all__ = ["PoolingFeature", "open_pooling"]
