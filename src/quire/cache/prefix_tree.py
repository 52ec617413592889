"""An index from token prefixes to KV blocks: a radix tree over whole blocks of tokens.

Prefix sharing by a tree over tokens follows SGLang's RadixAttention (Zheng et al., 2024); keys of
whole blocks, as in vLLM, keep a node's size fixed, so that no node ever has to be split.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from quire.cache.chain import Namespace, next_key, root_key
from quire.plan import Int32

NO_BLOCK = -1


class Node:
    """One block of tokens, after those of its ancestors.

    Attributes:
        users: requests that run on it. A request counts on each node from its root to its last.
        children: the nodes hanging on it, by the bytes of their tokens.
        blocks: one block id per KV group, or `NO_BLOCK`.
        chain: the name of its contents (`cache/chain.py`), once it was asked for.
    """

    __slots__ = ("blocks", "chain", "children", "key", "parent", "users")

    def __init__(self, key: bytes, parent: Node | None, blocks: list[int], users: int) -> None:
        self.key = key
        self.parent = parent
        self.blocks = blocks
        self.users = users
        self.chain: bytes | None = None
        self.children: dict[bytes, Node] = {}


@dataclass(slots=True)
class Match:
    """The longest reusable prefix.

    length: in tokens. path: the root, then one node per block of the prefix.
    """

    length: int
    path: list[Node]


class PrefixTree:
    """The tree of one engine. It keeps block ids but never touches the pools.

    **Eviction.** `_idle` lists the nodes without users in the order in which their last user left.
    Leaving happens from the last node up to the root, and whoever uses a node uses its ancestors,
    so a node always comes after all of its descendants: the first of the list is a leaf, and the
    least recently used one. `OrderedDict` is a hash table with a doubly linked list through it, so
    adding, removing and taking the first are O(1).

    **Windows.** A group with a sliding window can lose the block of any node that no request
    holds, and the node lives on for the other groups: `_loose` lists those, one list per group.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._loose: list[OrderedDict[Node, None]] = [OrderedDict() for _ in windows]
        self.num_nodes = 0

    @property
    def num_idle(self) -> int:
        """Nodes that eviction could remove."""
        return len(self._idle)

    def num_loose(self, group: int) -> int:
        """Blocks of a window group that only nodes hold."""
        return len(self._loose[group])

    # -- finding -------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Int32, limit: int) -> Match:
        """The longest prefix of `tokens`, int32 [n], of at most `limit` tokens, at which every
        group can resume. Changes nothing; `enter` the path before anything else happens."""
        node = self._roots.get(namespace) or Node(b"", None, [], 0)
        path = [node]
        stride = 4 * self.block_size
        data = tokens[: limit // self.block_size * self.block_size].tobytes()
        for at in range(0, len(data), stride):
            child = node.children.get(data[at : at + stride])
            if child is None:
                break
            path.append(child)
            node = child
        if self._windowed:
            del path[self._resumable(path) + 1 :]
        return Match((len(path) - 1) * self.block_size, path)

    def _resumable(self, path: list[Node]) -> int:
        """The largest number of blocks at which each window group holds its last window."""
        runs = [0] * len(self.windows)
        best = 0
        for i in range(1, len(path)):
            complete = True
            for g, window in self._windowed:
                runs[g] = runs[g] + 1 if path[i].blocks[g] != NO_BLOCK else 0
                complete &= runs[g] == i or runs[g] * self.block_size >= window - 1
            if complete:
                best = i
        return best

    # -- using ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace, path: list[Node]) -> None:
        """A request starts to run on these nodes, the first of which is the namespace's root."""
        root = path[0]
        if root not in self._names:
            self._roots[namespace] = root
            self._names[root] = namespace
        root.users += 1
        for node in path[1:]:
            self._use(node)

    def _use(self, node: Node) -> None:
        if node.users == 0:
            del self._idle[node]
        node.users += 1

    def leave(self, path: list[Node]) -> None:
        """A request stops running on these nodes, given from the root down."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                if node.parent is not None:
                    self._idle[node] = None
                else:
                    self._prune(node)

    def _prune(self, root: Node) -> None:
        """Forget a root that nothing needs, so that salts used once leave no trace."""
        if not root.users and not root.children:
            del self._roots[self._names.pop(root)]

    def extend(self, path: list[Node], key: bytes, blocks: list[int]) -> bool:
        """Go one block further, to the node of `key` (a block's tokens, as bytes). Where there is
        none it is made, with these blocks, and the answer is True. An existing node keeps its
        own."""
        parent = path[-1]
        node = parent.children.get(key)
        if node is not None:
            self._use(node)
            path.append(node)
            return False
        node = Node(key, parent, blocks, 1)
        parent.children[key] = node
        path.append(node)
        self.num_nodes += 1
        return True

    # -- giving up -----------------------------------------------------------------------------

    def chain(self, node: Node) -> bytes:
        """The name of the contents of a node's block. Each node's is worked out once."""
        path = [node]
        while path[-1].chain is None and path[-1].parent is not None:
            path.append(path[-1].parent)
        if path[-1].chain is None:
            path[-1].chain = root_key(self._names[path[-1]])
        name = path.pop().chain or b""
        for each in reversed(path):
            name = each.chain = next_key(name, each.key)
        return name

    def oldest(self) -> Node:
        """What `evict` removes next."""
        return next(iter(self._idle))

    def evict(self) -> list[int]:
        """Remove the least recently used node; its blocks, one or `NO_BLOCK` per group."""
        node, _ = self._idle.popitem(last=False)
        parent = node.parent
        if parent is None or node.children:
            raise RuntimeError("evicted a node that others hang on")
        del parent.children[node.key]
        for g, _ in self._windowed:
            self._loose[g].pop(node, None)
        self.num_nodes -= 1
        if parent.parent is None:
            self._prune(parent)
        return node.blocks

    def loosen(self, group: int, node: Node) -> None:
        """No request holds this node's block of a window group any more."""
        self._loose[group][node] = None

    def tighten(self, group: int, node: Node) -> None:
        """A request holds it again."""
        self._loose[group].pop(node, None)

    def evict_block(self, group: int) -> int:
        """Take the block of a window group that was let go longest ago from its node."""
        node, _ = self._loose[group].popitem(last=False)
        block, node.blocks[group] = node.blocks[group], NO_BLOCK
        return block

    def roots(self, most: int) -> list[Node]:
        """The roots of the namespaces that came last."""
        return list(islice(reversed(self._roots.values()), most))

    # -- for checks ----------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """Every node but the roots. For tests: it walks the tree."""
        found: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            children = list(stack.pop().children.values())
            found.extend(children)
            stack.extend(children)
        return found
