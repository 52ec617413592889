"""The KV cache's bookkeeping: which blocks requests hold, and which token prefixes they contain.

The scheduler uses `BlockManager` only. Features use `host_tier.py` and `loading.py`, which do the
bookkeeping of lower tiers. `inspect.py` summarizes the state for display.
"""

from quire.cache.block_hash import Namespace, next_hash
from quire.cache.block_manager import BlockManager, DetachedBlocks, Evicted
from quire.cache.block_pool import BlockPool
from quire.cache.prefix_tree import Match, PrefixTree

__all__ = [
    "BlockManager",
    "BlockPool",
    "DetachedBlocks",
    "Evicted",
    "Match",
    "Namespace",
    "PrefixTree",
    "next_hash",
]
