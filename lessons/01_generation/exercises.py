"""Three exercises on sampling and scoring.

python -m lessons check 1
"""

from __future__ import annotations

from torch import Tensor


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest tokens, likeliest first, that together have the probability p or more.

    logits: float [vocab]. p: in (0, 1]. Returns a copy in which all others are -inf.
    """
    raise NotImplementedError


def penalize(logits: Tensor, ids: list[int], penalty: float) -> Tensor:
    """Makes tokens that the text has less likely, each once, however often they stand there.

    A positive logit is divided by the penalty, a negative one multiplied (Keskar et al., 2019).
    logits: float [vocab]. penalty: >= 1. Returns a copy.
    """
    raise NotImplementedError


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """Returns exp of the mean of -log p(token), over all tokens but the first.

    logits: float [T, vocab]; row i is what comes after token i. ids: int64 [T].
    """
    raise NotImplementedError
