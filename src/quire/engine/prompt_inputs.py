"""Prompts and parameters of `LLM`'s callers, brought to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quire.errors import RequestError
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Params = TypeVar("Params", SamplingParams, PoolingParams)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Returns one prompt or several as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype != object:
        return [prompts]
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, (int, np.integer)) for item in many):
        return [many]
    return many


def read_prompt(prompt: Prompt) -> tuple[str | None, str | Sequence[int]]:
    """Returns (the prompt's text, what to tokenize or run).

    Raises:
        RequestError: a dict with other keys.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                'a prompt given as a dict has "prompt" or "prompt_token_ids", not '
                f"{', '.join(sorted(map(str, unknown))) or 'nothing'}",
                "prompt",
            )
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        return text, text if ids is None else ids  # type: ignore[return-value]
    return (prompt if isinstance(prompt, str) else None), prompt


def one_each(params: Params | Sequence[Params] | None, count: int, default: Params) -> list[Params]:
    """Returns the parameters of each of `count` prompts.

    Raises:
        RequestError: their number is another.
    """
    if params is None:
        return [default] * count
    if isinstance(params, (SamplingParams, PoolingParams)):
        return [params] * count
    if len(params) != count:
        kind = "sampling" if isinstance(default, SamplingParams) else "pooling"
        raise RequestError(f"{count} prompts but {len(params)} {kind} parameters", f"{kind}_params")
    return list(params)
