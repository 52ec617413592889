"""Conversion of validated requests to prompts and `SamplingParams`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.sampling_params import OPENAI, PARAMETERS, SamplingParams
from quire.server.apis.openai.protocol import ChatRequest, CompletionRequest, SamplingFields
from quire.server.apis.openai.structured import structured_outputs
from quire.server.apis.openai.vocabulary import bad_token_ids, breaker_ids, count_of_logprobs
from quire.server.apis.sampling import copied_fields, parameters_of
from quire.server.chat.text import Prompt
from quire.server.errors import ApiError
from quire.system import read_bounded

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.server.state import ServerState
    from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.server")

MAX_COMPLETIONS = 1024
"""Most completions of one request: prompts times `n`."""

MAX_LOGPROBS = 1_000_000
"""Most log-probabilities of one request's prompts, and as many of its completions."""

MAX_EXPERT_BYTES = 256 << 20
"""Most bytes of the experts that one request may return, before base64."""

_MUCH_TEXT = 4000
"""Characters of a request's prompts above which they are tokenized off the event loop."""

_USUAL_CHARS = 4
"""Usual characters per token."""

_COPIED = tuple(parameter.name for parameter in parameters_of(OPENAI))
_FROM_MODEL = tuple(p.name for p in PARAMETERS if p.declared.from_model)


def model_defaults(model_path: str) -> dict[str, float]:
    """Returns the sampling defaults of the model's `generation_config.json`; empty where there is
    none."""
    path = Path(model_path) / "generation_config.json"
    try:
        raw = json.loads(read_bounded(path))
    except (OSError, ValueError):
        return {}
    given = {name: raw[name] for name in _FROM_MODEL if raw.get(name) is not None}
    try:
        SamplingParams(**given)
    except (RequestError, TypeError) as error:
        logger.warning("generation_config.json is ignored: %s", error)
        return {}
    return given


def sampling_params(
    request: SamplingFields,
    state: ServerState,
    *,
    max_tokens: int | None,
    n: int | None = None,
    logprobs: int | None = None,
    blamed: str = "logprobs",
    detokenize: bool = True,
) -> SamplingParams:
    """Returns the sampling parameters of a request. Raises `RequestError` naming the field.

    Args:
        blamed: the field that `logprobs` comes from.
    """
    fields: dict[str, Any] = state.defaults | copied_fields(request, _COPIED)
    if request.stop is not None:
        fields["stop"] = tuple(request.stop)
    if request.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(request.allowed_token_ids)
    if request.bad_words:
        tokenizer = state.tokenizer("bad_words")
        fields["bad_token_ids"] = bad_token_ids(tokenizer, request.bad_words)
    if request.dry_multiplier:
        tokenizer = state.tokenizer("dry_multiplier")
        fields["dry_breaker_ids"] = breaker_ids(tokenizer, request.dry_sequence_breakers)
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _count(state, "prompt_logprobs", request.prompt_logprobs)
    return SamplingParams(
        **fields,
        n=n or 1,
        max_tokens=max_tokens,
        logprobs=None if logprobs is None else _count(state, blamed, logprobs),
        detokenize=detokenize,
        structured_outputs=structured_outputs(request, _added_tokens(state)),
    )


def _added_tokens(state: ServerState) -> Mapping[str, int]:
    return {} if state.client.tokenizer is None else state.client.tokenizer.added_tokens


def _count(state: ServerState, name: str, asked: int) -> int:
    return asked if asked >= 0 else count_of_logprobs(name, asked, state.client.config.vocab_size)


def prompts_of(value: Any, param: str = "prompt", most: int = MAX_COMPLETIONS) -> list[Prompt]:
    """Returns the prompts of `prompt` or `input`, a `TextsOrIds`.

    Raises:
        ApiError: there are too many.
    """
    if isinstance(value, str) or type(value[0]) is int:
        return [value]
    if len(value) > most:
        raise ApiError(
            400,
            f"At most {most} of '{param}' are allowed, got {len(value)}.",
            param=param,
            code="invalid_value",
        )
    prompts: list[Prompt] = value
    return prompts


async def tokenized(
    tokenizer: Tokenizer | None, prompts: list[Prompt], most: int, *, always: bool = False
) -> list[Prompt]:
    """Tokenizes many texts, off the event loop. Few or short ones are left to the engine's client.

    Args:
        most: most tokens of a prompt.
        always: whether few or short texts are tokenized too.
    """
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    few = not always and (len(prompts) == 1 or size < _MUCH_TEXT)
    if tokenizer is None or few or size == 0:
        return prompts
    encode = tokenizer.encode
    return await asyncio.to_thread(
        lambda: [encode(p, most=most).tolist() if isinstance(p, str) else p for p in prompts]
    )


def estimate_tokens(prompt: Prompt) -> int:
    """Returns the number of a prompt's tokens, estimated for a text."""
    return len(prompt) // _USUAL_CHARS + 1 if isinstance(prompt, str) else len(prompt)


def prompt_text(tokenizer: Tokenizer | None, prompt: Prompt) -> str:
    """Returns the prompt as a text for the log."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt) if tokenizer is None else tokenizer.decode(prompt, False)


def check_streaming(body: ChatRequest | CompletionRequest) -> None:
    """Refuses fields that only streams have, or only whole answers. Raises ApiError, 400."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "'stream_options' is only allowed with stream=true.", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400, "'prompt_logprobs' is not available with stream=true.", param="prompt_logprobs"
        )


def check_prompt_logprobs(tokens: int, params: SamplingParams, copies: int, param: str) -> None:
    """Raises ApiError, 400, if the prompts have too many log-probabilities.

    Args:
        tokens: number of tokens of all prompts.
        copies: number of choices that repeat those of a prompt.
        param: the field that asks for log-probabilities.
    """
    if params.prompt_logprobs is None:
        return
    count = tokens * (params.prompt_logprobs + 1) * copies
    if count > MAX_LOGPROBS:
        raise _too_many_logprobs(count, f"'{param}' or 'n'", param, "prompts")


def check_logprobs(
    params: SamplingParams,
    prompts: int,
    most: int,
    param: str,
    others: Sequence[str] = ("max_tokens", "n"),
) -> None:
    """Raises ApiError, 400, if the completions may have too many log-probabilities.

    Args:
        most: most tokens that a completion may have.
        param: the field that asks for log-probabilities.
        others: further fields that change their number.
    """
    if params.logprobs is None or params.max_tokens is None:
        return
    tokens = min(params.max_tokens, most) * params.n * prompts
    count = tokens * (params.logprobs + 1)
    if count > MAX_LOGPROBS:
        fields = " or ".join(f"'{name}'" for name in (param, *others))
        raise _too_many_logprobs(count, fields, param, "completions")


def check_routed_experts(
    config: EngineConfig, params: SamplingParams, prompts: Sequence[int]
) -> None:
    """Raises ApiError, 400, if the experts of the request's tokens may be too large an answer.

    Args:
        prompts: number of tokens of each prompt.
    """
    if not params.return_routed_experts:
        return
    most = config.scheduler.max_model_len
    room = most if params.max_tokens is None else params.max_tokens
    tokens = params.n * sum(min(length + room, most) for length in prompts)
    size = 2 * config.experts_per_token * tokens
    if size > MAX_EXPERT_BYTES:
        raise ApiError(
            400,
            f"The experts of the request's prompts and completions may take {size} bytes; at most "
            f"{MAX_EXPERT_BYTES} are allowed: lower 'max_tokens' or 'n', or send fewer prompts.",
            param="return_routed_experts",
            code="invalid_value",
        )


def usual_room(params: SamplingParams, most: int) -> int | None:
    """Returns the token limit of a completion whose request sets none.

    The limit keeps its log-probabilities within `MAX_LOGPROBS`. Returns None if the context is the
    lower limit.

    Args:
        most: most tokens that a completion may have.
    """
    if params.logprobs is None or params.max_tokens is not None:
        return None
    room = MAX_LOGPROBS // (params.n * (params.logprobs + 1))
    return room if room < most else None


def _too_many_logprobs(count: int, fields: str, param: str, of: str) -> ApiError:
    return ApiError(
        400,
        f"The request may have {count} log-probabilities of its {of} (tokens, times alternatives "
        f"and one more, times completions); at most {MAX_LOGPROBS} are allowed: lower {fields}.",
        param=param,
        code="invalid_value",
    )


def check_fan_out(prompts: int, n: int | None) -> None:
    total = prompts * (n or 1)
    if total > MAX_COMPLETIONS:
        raise ApiError(
            400,
            f"{prompts} prompts with n={n or 1} make {total} completions; at most "
            f"{MAX_COMPLETIONS} are allowed in one request.",
            param="n",
            code="invalid_value",
        )
