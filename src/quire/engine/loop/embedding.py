"""Embeddings: from a pooled hidden state to the user's vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.arrays import Float32, Int32
from quire.config import EngineConfig
from quire.engine.loop.core import EngineCore
from quire.engine.loop.prompts import Prompt, one_each, prompt_ids, read_prompt
from quire.errors import BrokenLogitsError, RequestError
from quire.features.pooling.fields import SECOND_TEXT
from quire.outputs import EmbeddingOutput, EmbeddingRequestOutput
from quire.pooling_params import PoolingParams
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.text.pairs import encode_texts
from quire.text.tokenizer import Tokenizer

NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Sampling parameters of requests that only read their prompt."""


@dataclass(slots=True)
class Embedding:
    """An embedding.

    Attributes:
        values: float32 [dimensions]; with a vector for each token [tokens, dimensions].
        queued: seconds until the prompt's first step.
    """

    values: Float32
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    queued: float = 0.0


_ENCODERS_ONLY = "cls", "max"


def pooling_of(params: PoolingParams, config: EngineConfig) -> str:
    """Returns how to pool, for a valid request: the value of `Request.pooling`.

    Raises:
        RequestError: the model gives no vectors, or not such ones.
    """
    _check_dimensions(params.dimensions, config)
    if config.task == "classify":
        raise RequestError(
            "this model has a classification head and gives no embeddings: use /classify, /score "
            "or /rerank",
            code="model_gives_no_vectors",
        )
    if config.task == "tokens":
        if params.pooling is not None:
            raise RequestError(
                "this model has a vector for each token, which are not pooled", "pooling"
            )
        return "tokens"
    if params.pooling in _ENCODERS_ONLY and not config.encoder:
        raise RequestError(f"pooling {params.pooling!r} needs an encoder", "pooling")
    return params.pooling or config.pooling


def with_prompt(prompt: Any, params: PoolingParams, config: EngineConfig) -> Any:
    """Returns a prompt behind the model's prompt that the parameters name, or behind its default.

    Raises:
        RequestError: the model has no prompt of that name, or it cannot precede token ids.
    """
    name = params.prompt_name or config.default_prompt
    if name is None:
        return prompt
    if name not in config.prompts:
        known = ", ".join(config.prompts) or "none"
        raise RequestError(f"this model has no prompt {name!r}; it has: {known}", "prompt_name")
    if isinstance(prompt, str):
        return config.prompts[name] + prompt
    if params.prompt_name is not None and config.prompts[name]:
        raise RequestError("a prompt can precede texts only, not token ids", "prompt_name")
    return prompt


def _check_dimensions(wanted: int | None, config: EngineConfig) -> None:
    size, known = config.embedding_size, config.matryoshka
    if wanted is None or wanted == size:
        return
    if known is None:
        raise RequestError(
            f"this model's embeddings have {size} dimensions, and it does not support fewer "
            "(its config.json has neither is_matryoshka nor matryoshka_dimensions)",
            param="dimensions",
        )
    if known and wanted not in known:
        raise RequestError(
            f"this model's embeddings can have {', '.join(map(str, known))} dimensions, not "
            f"{wanted}",
            param="dimensions",
        )
    if wanted > size:
        raise RequestError(
            f"this model's embeddings have {size} dimensions at most, not {wanted}",
            param="dimensions",
        )


def embed_all(
    core: EngineCore,
    tokenizer: Tokenizer | None,
    prompts: Mapping[str, Prompt],
    params: PoolingParams | Sequence[PoolingParams] | None,
    let_interrupt: Callable[[], None],
    done: Callable[[], None],
) -> list[EmbeddingRequestOutput]:
    """Computes embeddings in the caller's thread, and returns them in the prompts' order.

    Args:
        prompts: prompts by request id.
        params: one for all prompts, or one for each; None: the defaults.
        let_interrupt: called before each step.
        done: called once for each finished vector.

    Raises:
        RequestError: a request is invalid. Nothing has run then.
    """
    each = one_each(params, len(prompts), PoolingParams())
    given = [
        with_prompt(read_prompt(prompt)[1], own, core.config)
        for prompt, own in zip(prompts.values(), each, strict=True)
    ]
    if tokenizer is not None:
        given = encode_texts(tokenizer, given)
    ids = [prompt_ids(prompt, NO_TOKENS, core.config, tokenizer) for prompt in given]
    wanted = dict(zip(prompts, zip(ids, each, strict=True), strict=True))
    found = {}
    for output in embeddings(core, wanted, let_interrupt):
        found[output.request_id] = output
        done()
    return [found[name] for name in prompts]


def embeddings(
    core: EngineCore,
    wanted: Mapping[str, tuple[Int32, PoolingParams]],
    let_interrupt: Callable[[], None],
) -> Iterator[EmbeddingRequestOutput]:
    """Runs requests in the caller's thread, and yields each output when its vector is complete.

    Args:
        wanted: by request id, the prompt's tokens and how to pool.
        let_interrupt: called before each step.

    Raises:
        RequestError: a request is invalid. Nothing has run then.
    """
    prompts = {
        name: PooledPrompt(tokens, pooling_of(params, core.config))
        for name, (tokens, params) in wanted.items()
    }
    for name, request, raw in run_pooled(core, prompts, let_interrupt):
        yield EmbeddingRequestOutput(
            name,
            EmbeddingOutput(finish(raw, wanted[name][1]).tolist()),
            request.as_read(request.tokens.view()).tolist(),
            num_cached_tokens=request.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt whose states become a vector, classes or token vectors.

    Attributes:
        ids: int32 [n].
        kind: the value of `Request.pooling`.
        second: where the second text of a pair begins, or None.
    """

    ids: Int32
    kind: str
    second: int | None = None


def run_pooled(
    core: EngineCore, prompts: Mapping[str, PooledPrompt], let_interrupt: Callable[[], None]
) -> Iterator[tuple[str, Request, Float32]]:
    """Runs prompts in the caller's thread. Yields each one's name, its ended request and what the
    engine returned.

    Args:
        prompts: by request id.
        let_interrupt: called before each step.

    Raises:
        RequestError: a request is invalid. Nothing has run then.
    """
    for name, prompt in prompts.items():
        core.add(name, prompt.ids, NO_TOKENS, max_total=len(prompt.ids) + 1, pooling=prompt.kind)
        if prompt.second is not None:
            core.give(name, SECOND_TEXT, prompt.second)
    left = len(prompts)
    while left:
        let_interrupt()
        progress = core.step()
        if progress is None:
            raise RequestError("the engine has requests but cannot run any of them")
        for place in progress.finished:
            item = progress[place]
            if item.pooled is None:
                raise RequestError("the engine returned no vector")
            left -= 1
            yield item.request.request_id.rpartition("/")[0], item.request, item.pooled


def finish(pooled: Float32, params: PoolingParams) -> Float32:
    """Truncates and normalizes a pooled state, float32 [hidden size], or one for each token.

    Returns:
        The embedding, float32 [dimensions], or [tokens, dimensions].

    Raises:
        BrokenLogitsError: the state is not finite.
    """
    values = pooled[..., : params.dimensions]
    if not np.isfinite(values).all():
        raise BrokenLogitsError()
    if params.normalize:
        length = np.linalg.norm(values, axis=-1, keepdims=True)
        values = values / np.maximum(length, 1e-12)
    return np.ascontiguousarray(values, dtype=np.float32)
