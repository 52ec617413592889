"""The KV cache's bookkeeping: which blocks requests hold, and which token prefixes they contain.

The scheduler uses `BlockManager` only. `inspect.summarize` describes the state for display.
"""

from quire.cache.block_hash import Namespace, next_hash
from quire.cache.block_manager import BlockManager, DetachedBlocks, Evicted
from quire.cache.block_pool import BlockPool
from quire.cache.host_tier import HashList, HostTier
from quire.cache.inspect import CacheSummary, summarize
from quire.cache.loading import LoadingPrefix, PrefixLoader
from quire.cache.prefix_tree import Match, PrefixTree

__all__ = [
    "BlockManager",
    "BlockPool",
    "CacheSummary",
    "DetachedBlocks",
    "Evicted",
    "HashList",
    "HostTier",
    "LoadingPrefix",
    "Match",
    "Namespace",
    "PrefixLoader",
    "PrefixTree",
    "next_hash",
    "summarize",
]
