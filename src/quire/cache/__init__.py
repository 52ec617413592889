"""Where KV blocks are: who holds them, which token prefixes they belong to.

`BlockManager` is the only caller of `BlockPool` and `PrefixTree`, and all that the scheduler sees.
"""

from quire.cache.block_manager import BlockManager
from quire.cache.block_pool import BlockPool
from quire.cache.prefix_tree import Match, Namespace, PrefixTree

__all__ = ["BlockManager", "BlockPool", "Match", "Namespace", "PrefixTree"]
