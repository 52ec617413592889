"""Three exercises on ranks.

python -m lessons check 10
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def bounds(size: int, unit: int, rank: int, world: int) -> tuple[int, int]:
    """Returns the outputs [first, last) of a layer that a rank holds.

    size: outputs of the whole layer. unit: outputs that may not be cut, such as a head's. Every
    rank holds as many; raises ValueError where that is not possible.
    """
    raise NotImplementedError


def likeliest(shards: Sequence[Tensor]) -> Tensor:
    """Returns the likeliest tokens, int64 [n], of logits that are shared out over ranks.

    shards: each rank's columns of the logits, float [n, vocab / world], in rank order. Of equal
    logits the lowest token wins. Ranks send their best logit and its token only: the whole logits
    may not be put together.
    """
    raise NotImplementedError


def busy_share(stages: int, groups: int, steps: int) -> float:
    """Returns the share of ticks in which a pipeline's stages have work.

    Each of the groups needs `steps` passes through all stages, one after the other; a stage takes
    one tick for one group; ticks are counted from the first start to the last end.
    """
    raise NotImplementedError
