"""Chooses a replica for each request, by the prefix that it is likely to hold and by its load.

The router estimates each replica's cache from the prompts that it sent there. It never asks the
replicas. It keeps the keys of the prompts' pieces, as many as the KV cache has room for, and drops
the least recently used first.

The cost of a choice is a number of tokens to compute, a sum of three parts:

- The tokens of the prompt that the replica probably does not hold.
- Half of the tokens of prompts that the replica has not answered yet. If they counted more, every
  burst would drive requests away from the replicas that hold their prefixes.
- `RUNNING_TOKENS` for each request that the replica runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from quire.arrays import Int32
from quire.cache.block_hash import next_hash, root_hash

PIECE = 64
"""Tokens of a prompt's piece; a key stands for all tokens up to a piece's end."""
RUNNING_TOKENS = 32
"""A running request costs as much as this many prompt tokens."""
_UNKNOWN_TOKENS = 1 << 17
"""Assumed capacity of a replica's cache, in tokens, until the replica has reported it."""


def keys_of(tokens: Int32, namespace: str) -> list[bytes]:
    """Returns the keys of a prompt's whole pieces.

    Args:
        namespace: a text that is the same for all prompts that may share KV.
    """
    key, keys = root_hash((0, namespace)), []
    for end in range(PIECE, len(tokens) + 1, PIECE):
        key = next_hash(key, tokens[end - PIECE : end].tobytes())
        keys.append(key)
    return keys


class Replica:
    """An estimate of one replica's cache and load.

    Attributes:
        running: number of requests.
        waiting: tokens of prompts that the replica has not answered yet.
        others: number of requests from other clients.
    """

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.others = 0
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._most = _UNKNOWN_TOKENS // PIECE

    def has_room(self, tokens: int) -> None:
        """Sets the capacity of the replica's cache, in tokens."""
        self._most = max(1, tokens // PIECE)

    def held(self, keys: Sequence[bytes]) -> int:
        """Returns how many of a prompt's tokens the replica probably holds."""
        return self.held_pieces(keys) * PIECE

    def held_pieces(self, keys: Sequence[bytes]) -> int:
        """Returns how many of a prompt's pieces the replica probably holds."""
        count = 0
        for key in keys:
            if key not in self._held:
                break
            count += 1
        return count

    def take(self, keys: Sequence[bytes]) -> None:
        """Records that the replica will hold a prompt. Its last pieces are evicted first."""
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Records that the replica no longer holds a prompt."""
        for key in keys:
            self._held.pop(key, None)

    def forget(self) -> None:
        """Records that the replica holds nothing, as after a restart."""
        self._held.clear()


class Placement:
    """A request at a replica, from `ReplicaRouter.place` until `end`."""

    def __init__(self, replica: Replica, index: int, tokens: int) -> None:
        self.index = index
        self._replica = replica
        self._tokens = tokens
        self._ended = False
        replica.running += 1
        replica.waiting += tokens

    def answered(self) -> None:
        """Records the first token. Idempotent."""
        self._replica.waiting -= self._tokens
        self._tokens = 0

    def end(self) -> None:
        """Records the request's end. Idempotent."""
        self.answered()
        if not self._ended:
            self._ended = True
            self._replica.running -= 1


def cheapest(
    able: Mapping[int, Replica], keys: Sequence[bytes], tokens: int, turn: int
) -> Placement:
    """Places a prompt at the replica with the lowest cost.

    Args:
        able: replicas that may be chosen, by number; at least one.
        keys: keys of the prompt's pieces.
        tokens: number of the prompt's tokens.
        turn: breaks ties if the prompt has no keys.
    """
    # Ties are broken by the prompt, so that independent routers choose the same replica for it.
    first = int.from_bytes(keys[0][:8]) if keys else turn
    around = max(able) + 1
    costs = {}
    for index, replica in able.items():
        lacks = max(0, tokens - replica.held(keys))
        load = replica.waiting / 2 + RUNNING_TOKENS * (replica.running + replica.others)
        costs[index] = (lacks + load, (index - first) % around, lacks)
    chosen = min(costs, key=lambda index: costs[index])
    able[chosen].take(keys)
    return Placement(able[chosen], chosen, costs[chosen][2])


class ReplicaRouter:
    """Places requests at replicas, which are numbered from 0."""

    def __init__(self, replicas: int) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self._turn = 0

    def place(self, tokens: Int32, namespace: str, able: Sequence[int]) -> Placement:
        """Chooses one of the replicas in `able`, which can take a request."""
        self._turn += 1
        found = {index: self.replicas[index] for index in able}
        return cheapest(found, keys_of(tokens, namespace), len(tokens), self._turn)
