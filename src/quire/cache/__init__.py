"""Where KV blocks are: who holds them, which token prefixes they belong to.

`BlockManager` is all that the scheduler sees.
"""

from quire.cache.block_manager import BlockManager, Evicted
from quire.cache.block_pool import BlockPool
from quire.cache.chain import Namespace
from quire.cache.host_tier import HostTier, KeyList
from quire.cache.incoming import Incoming
from quire.cache.prefix_tree import Match, PrefixTree

__all__ = [
    "BlockManager",
    "BlockPool",
    "Evicted",
    "HostTier",
    "Incoming",
    "KeyList",
    "Match",
    "Namespace",
    "PrefixTree",
]
