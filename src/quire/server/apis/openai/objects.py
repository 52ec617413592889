"""Answers of OpenAI's APIs, as msgspec structs with fields in OpenAI's order."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.loop.output import CompletionUpdate
from quire.outputs import VersionRun
from quire.server.chat.text import CompletionUsage

Choice = TypeVar("Choice")

PromptLogprobs = list[msgspec.Raw | None]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities as parallel lists, one entry per token.

    The first token of an echoed prompt has no log-probability. top_logprobs: of each token a map
    from texts to numbers.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[msgspec.Raw | None] | None = []
    text_offset: list[int] = []


class TokensOfVersion(msgspec.Struct):
    """Consecutive tokens that one version of the weights gave.

    version: number of the weights' updates before.
    """

    version: int
    tokens: int


def versions_of(runs: Sequence[VersionRun], *, always: bool) -> list[TokensOfVersion] | UnsetType:
    """Returns the versions of a choice's tokens for its answer.

    Unless `always`, they are left out while the weights are those that the engine began with.
    """
    if not always and not any(version for version, _ in runs):
        return UNSET
    found: list[TokensOfVersion] = []
    for version, tokens in runs:
        if found and found[-1].version == version:
            found[-1].tokens += tokens
        elif tokens:
            found.append(TokensOfVersion(version, tokens))
    return found


class SamplingInfoLists(msgspec.Struct):
    """Numbers about the draws of a choice's tokens, as parallel lists.

    The fields are those of `quire.outputs.SamplingInfo`.
    """

    raw_logprobs: list[float]
    processed_logprobs: list[float]
    mask_sizes: list[int]


class EncodedArray(msgspec.Struct):
    """An array. data: its little-endian values in row-major order, in base64."""

    dtype: str
    shape: list[int]
    data: str


def sampling_info_of(
    last: CompletionUpdate | None, count: int | None = None
) -> SamplingInfoLists | UnsetType:
    """Returns how a choice's tokens were drawn, if its request asks for it and it has ended.

    Args:
        count: how many of the tokens are shown; None: all.
    """
    if last is None or last.sampling_info is None:
        return UNSET
    info = last.sampling_info
    columns = info.raw_logprobs, info.processed_logprobs, info.mask_sizes
    return SamplingInfoLists(*(column[:count].tolist() for column in columns))


def routed_experts_of(last: CompletionUpdate | None) -> EncodedArray | UnsetType:
    """Returns the experts of a choice's tokens, if its request asks for them and it has ended."""
    if last is None or last.routed_experts is None:
        return UNSET
    array = last.routed_experts
    data = base64.b64encode(array.astype("<i2").tobytes()).decode()
    return EncodedArray("int16", list(array.shape), data)


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_versions: list[TokensOfVersion] | UnsetType = UNSET
    sampling_info: SamplingInfoLists | UnsetType = UNSET
    routed_experts: EncodedArray | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """content: of each token a `ChatTokenLogprob`."""

    content: list[msgspec.Raw]
    refusal: None = None


class ChatFunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ChatCustomCall(msgspec.Struct):
    name: str
    input: str


class MessageToolCall(msgspec.Struct):
    """A call of a function, or of a custom tool."""

    id: str
    function: ChatFunctionCall | UnsetType = UNSET
    custom: ChatCustomCall | UnsetType = UNSET
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """An answer's message.

    `reasoning` and `reasoning_content` have the same text, because clients differ in the name.
    `content` is null if the answer has only calls or only reasoning. `function_call` is set if the
    request has `functions`.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    function_call: ChatFunctionCall | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    input: str = ""


class ToolCallChunk(msgspec.Struct):
    """A part of a tool call. `id`, `type` and the tool's name come with a call's first chunk
    only. `custom` takes the place of `function` in a call of a custom tool."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


# Stage 5 of a text: one `ChatEvent` in the shape of OpenAI's stream.
class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[TokensOfVersion] | UnsetType = UNSET
    sampling_info: SamplingInfoLists | UnsetType = UNSET
    routed_experts: EncodedArray | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[TokensOfVersion] | UnsetType = UNSET
    sampling_info: SamplingInfoLists | UnsetType = UNSET
    routed_experts: EncodedArray | UnsetType = UNSET


class CompletionObject(msgspec.Struct, Generic[Choice]):
    """A whole answer, or one chunk of a stream.

    service_tier, metadata: echoed where the request gave them. prompt_token_ids: of chats, which
    have one prompt; text completions have them in their choices.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct):
    text: str
    finish_reason: str | None
    usage: CompletionUsage
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[TokensOfVersion] | UnsetType = UNSET
    sampling_info: SamplingInfoLists | UnsetType = UNSET
    routed_experts: EncodedArray | UnsetType = UNSET


class AcceptedImages(msgspec.Struct):
    """Limits of the images that a request may have.

    Attributes:
        max_bytes: most bytes of an image's file, in a body of the largest size.
        max_pixels: width times height.
    """

    max_images: int
    max_bytes: int
    max_pixels: int


class ModelCard(msgspec.Struct):
    """The served model, or an adapter of it.

    Attributes:
        sampling_defaults: parameters that a request without them gets, where they are not the
            API's own.
        root: the model's own name or an adapter's.
        parent: the model of an adapter.
        images: left out if the model does not see images.
    """

    id: str
    created: int
    max_model_len: int
    sampling_defaults: dict[str, float]
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "quire"
    images: AcceptedImages | UnsetType = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
