"""A request is checked once, before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import PromptTooLongError, RequestError
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


def prompt_ids(
    prompt: str | Sequence[int] | Int32,
    params: SamplingParams,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> Int32:
    """The prompt's tokens, int32 [n], fit to run with `params`.

    Raises:
        PromptTooLongError: no room is left for a single new token.
        RequestError: it is empty, names tokens outside the vocabulary, or needs a tokenizer that
            was not loaded.
    """
    ids = _tokens(prompt, tokenizer, config.scheduler.max_model_len)
    if len(ids) == 0:
        raise RequestError("the prompt is empty", "prompt")
    _in_vocabulary("prompt", (int(ids.min()), int(ids.max())), config)
    _in_vocabulary("stop_token_ids", params.stop_token_ids, config)
    _in_vocabulary("logit_bias", params.logit_bias or (), config)
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, which was not loaded", "stop")
    if params.structured_outputs is not None and tokenizer is None:
        raise RequestError(
            "structured outputs need a tokenizer, which was not loaded", "structured_outputs"
        )
    limit = config.scheduler.max_model_len
    if len(ids) >= limit:
        raise PromptTooLongError(len(ids), limit)
    return ids


def max_total(prompt_len: int, params: SamplingParams, config: EngineConfig) -> int:
    """The length, prompt included, at which a request must end."""
    limit = config.scheduler.max_model_len
    return limit if params.max_tokens is None else min(limit, prompt_len + params.max_tokens)


def _tokens(prompt: str | Sequence[int] | Int32, tokenizer: Tokenizer | None, most: int) -> Int32:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, which was not loaded", "prompt")
        return tokenizer.encode(prompt, most=most)
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):  # ragged lists
        ids = np.empty((1, 1))
    if ids.shape == (0,):
        return np.empty(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("a prompt is a text or a list of token ids (integers)", "prompt")
    if max(int(ids.max()), -int(ids.min())) > np.iinfo(np.int32).max:
        raise RequestError(f"token ids {ids.min()} to {ids.max()} are out of range", "prompt")
    return ids.astype(np.int32)


def _in_vocabulary(param: str, ids: Iterable[int], config: EngineConfig) -> None:
    for id in ids:
        if not 0 <= id < config.vocab_size:
            raise RequestError(
                f"{param} has token id {id}, but the vocabulary ends at {config.vocab_size - 1}",
                param,
            )
