"""Three exercises on scheduling.

python -m lessons check 4
"""

from __future__ import annotations


def padding(lengths: list[int], rows: int) -> float:
    """Returns the share of padding in batches that are padded to their longest prompts.

    Each batch takes the next `rows` prompts, in order; the last one what is left.
    """
    raise NotImplementedError


def steps_to_first_token(prompt: int, budget: int, decoding: int) -> int:
    """Returns the steps that a prompt takes beside `decoding` requests, which come first.

    A step computes at most `budget` tokens. budget > decoding.
    """
    raise NotImplementedError


def victims(running: list[tuple[str, int]], needed: int) -> list[str]:
    """Returns whom to preempt, in order, so that at least `needed` blocks become free.

    running: (name, blocks) of the requests in their order of arrival. The last to come go first.
    The oldest is never preempted, so that somebody always comes to an end.
    """
    raise NotImplementedError
