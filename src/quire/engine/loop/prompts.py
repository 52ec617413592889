"""Converts the prompts and parameters of callers to one form, and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import PromptTooLongError, RequestError
from quire.features.call import PromptInputs, PromptPart, PromptReader
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. A dict for `LLM.generate` may
have "multi_modal_data" too: {"image": one image or a list of them}."""

_PARTS = "multi_modal_data"

Params = TypeVar("Params", SamplingParams, PoolingParams)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Returns one prompt or several as a list. Raises RequestError for anything else."""
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


def read_prompt(
    prompt: Prompt, *, with_parts: bool = False
) -> tuple[str | None, str | Sequence[int]]:
    """Returns the prompt's text, if it has one, and the text to tokenize or the token ids.

    Args:
        with_parts: whether it may have parts that are no text, see `prompt_parts`.

    Raises:
        RequestError: the prompt is a dict with other keys.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if with_parts:
            unknown -= {_PARTS}
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


def prompt_parts(prompt: Prompt) -> list[PromptPart]:
    """Returns the parts of a prompt that are no text, by its "multi_modal_data".

    Raises:
        RequestError: it is no dict of lists.
    """
    given = prompt.get(_PARTS) if isinstance(prompt, Mapping) else None
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise RequestError(
            f'"{_PARTS}" is a dict as {{"image": [...]}}, not {type(given).__name__}', _PARTS
        )
    parts = []
    for kind, sources in given.items():
        many = sources if isinstance(sources, list | tuple) else [sources]
        for place, source in enumerate(many):
            name = f"{_PARTS}.{kind}[{place}]"
            # `take_parts` has named the places of a conversation.
            parts.append(
                source if isinstance(source, PromptPart) else PromptPart(str(kind), source, name)
            )
    return parts


def place_parts(
    reader: PromptReader | None, ids: Int32, parts: Sequence[PromptPart], config: EngineConfig
) -> tuple[Int32, PromptInputs]:
    """Returns the prompt with room for its parts, and the parts.

    Raises:
        RequestError: a part cannot be used.
        PromptTooLongError: the context has no room for a new token.
    """
    if reader is None:
        raise RequestError("prompts have no parts besides text", _PARTS)
    ids, inputs = reader.place(ids, reader.read(parts))
    check_length(len(ids), config)
    return ids, inputs


def check_length(count: int, config: EngineConfig) -> None:
    """Raises PromptTooLongError if a prompt of `count` tokens is too long, or leaves no room for a
    new token where one is generated."""
    if count > config.longest_prompt:
        limit = config.scheduler.max_model_len
        raise PromptTooLongError(count, limit, generates=not config.encoder)


def one_each(params: Params | Sequence[Params] | None, count: int, default: Params) -> list[Params]:
    """Returns the parameters of each of `count` prompts.

    Raises:
        RequestError: their number differs from `count`, or they have a wrong type.
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


# Conversations of `LLM`'s callers as prompts.

_OWN = ("self", "messages", "add_generation_prompt", "chat_template")


def chat_prompts(
    tokenizer: Tokenizer,
    messages: object,
    add_generation_prompt: bool,
    chat_template: str | None,
    variables: Mapping[str, Any],
) -> list[Prompt]:
    """Returns the prompts of one conversation or several.

    Args:
        variables: additional variables of the template.

    Raises:
        RequestError: `messages` are not conversations, the template refuses one, or `variables`
            has a name that the template gets anyway.
    """
    for name in variables:
        if name in _OWN or name in tokenizer.special_tokens:
            raise RequestError(
                f"{name!r} cannot be set through chat_template_kwargs", "chat_template_kwargs"
            )
    prompts: list[Prompt] = []
    for conversation in as_conversations(messages):
        shown, parts = take_parts(conversation)
        text = tokenizer.apply_chat_template(
            shown,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **variables,
        )
        # The template has already written the special tokens.
        ids = tokenizer.encode(text, add_special_tokens=False)
        more = {_PARTS: {"image": parts}} if parts else {}
        prompts.append({"prompt": text, "prompt_token_ids": ids, **more})
    return prompts


def take_parts(
    conversation: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], list[PromptPart]]:
    """Returns a conversation as chat templates take it, and its parts that are no text."""
    parts: list[PromptPart] = []
    messages = []
    for place, message in enumerate(conversation):
        content = message.get("content")
        if isinstance(content, list | tuple):
            shown = [
                _take_part(item, f"messages[{place}].content[{index}]", parts)
                for index, item in enumerate(content)
            ]
            message = {**message, "content": shown}
        messages.append(message)
    return messages, parts


def _take_part(item: Any, param: str, parts: list[PromptPart]) -> Any:
    """Returns an item of a message's content as a template takes it.

    Args:
        parts: gets the item's part, if it is no text.
    """
    if not isinstance(item, Mapping):
        return item
    kind = str(item.get("type"))
    family = next((name for name in ("image", "video", "audio") if name in kind), None)
    if family is None:
        return item
    given = item.get(kind, item.get(family))
    part: Mapping[str, Any] = given if isinstance(given, Mapping) else {"url": given}
    parts.append(PromptPart(family, part.get("url"), param, part.get("detail", "auto")))
    return {"type": family}


def as_conversations(messages: object) -> list[Sequence[Mapping[str, Any]]]:
    """Returns one conversation or several as a list. Raises RequestError for anything else."""
    if _all(Mapping, messages):
        return [messages]  # type: ignore[list-item]
    if isinstance(messages, list | tuple) and all(_all(Mapping, each) for each in messages):
        return list(messages)
    raise RequestError("a conversation is a list of dicts with role and content", "messages")


def _all(kind: type, items: object) -> bool:
    return (
        isinstance(items, list | tuple) and bool(items) and all(isinstance(i, kind) for i in items)
    )


# Checks of a request, made once and before anything is allocated for it.


def prompt_ids(
    prompt: str | Sequence[int] | Int32,
    params: SamplingParams,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> Int32:
    """Returns the prompt's tokens, int32 [n], after checking that they can run with `params`.

    Raises:
        PromptTooLongError: the context has no room for a new token.
        RequestError: the prompt is empty, has tokens outside the vocabulary, or needs a tokenizer
            that was not loaded.
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
    check_length(len(ids), config)
    return ids


def max_total(prompt_len: int, params: SamplingParams, config: EngineConfig) -> int:
    """Returns the length, prompt included, at which a request must end."""
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
    largest = np.iinfo(np.int32).max
    for id in (int(ids.min()), int(ids.max())):
        if abs(id) > largest:
            raise RequestError(f"token id {id} is out of range, 0 to {largest}", "prompt")
    return ids.astype(np.int32)


def _in_vocabulary(param: str, ids: Iterable[int], config: EngineConfig) -> None:
    for id in ids:
        if not 0 <= id < config.vocab_size:
            raise RequestError(
                f"{param} has token id {id}, but the vocabulary ends at {config.vocab_size - 1}",
                param,
            )
