"""Prompts and parameters of `LLM`'s callers, brought to one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quire.errors import RequestError
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Params = TypeVar("Params", SamplingParams, PoolingParams)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Returns one prompt or several as a list. Raises RequestError where they are neither."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype != object:
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError(
            f"a prompt is a text, a list of token ids or a dict, not {type(prompts).__name__}",
            "prompt",
        )
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
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt's text is a string, not {type(text).__name__}", "prompt")
        return text, text if ids is None else ids  # type: ignore[return-value]
    return (prompt if isinstance(prompt, str) else None), prompt


def one_each(params: Params | Sequence[Params] | None, count: int, default: Params) -> list[Params]:
    """Returns the parameters of each of `count` prompts.

    Raises:
        RequestError: their number is another, or they are something else.
    """
    if params is None:
        return [default] * count
    kind = "sampling" if isinstance(default, SamplingParams) else "pooling"
    if isinstance(params, type(default)):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(p, type(default)) for p in params
    ):
        raise RequestError(
            f"{kind} parameters are {type(default).__name__} or a list of them", f"{kind}_params"
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} {kind} parameters", f"{kind}_params")
    return list(params)
