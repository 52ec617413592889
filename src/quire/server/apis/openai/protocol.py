"""Bodies of OpenAI's routes. Fields that are not listed here are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from quire.errors import RequestError
from quire.sampling_params import MAX_ALLOWED, MAX_BAD, OPENAI
from quire.server.apis.openai.beams import BeamFields
from quire.server.apis.openai.messages import (
    ChatMessageParam,
    ChatToolParam,
    FunctionChoice,
    FunctionDefinition,
    ToolChoiceParam,
    parse_tool_choice,
)
from quire.server.apis.openai.structured import StructuredFields
from quire.server.apis.sampling import sampling_model
from quire.server.chat.dialogue import ToolChoice
from quire.server.http.strict_model import (
    INT32_MAX,
    Count,
    LogitBias,
    Metadata,
    Name,
    RequestId,
    ServiceTier,
    StrictModel,
    TemplateKwargs,
    TextsOrIds,
    TruncationSide,
    check_side,
    drop_unused,
)

MAX_STOP = 64
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_BREAKERS = 64
MAX_TEMPLATE = 65_536
"""Most characters of a request's own chat template."""
MAX_BAD_WORDS = MAX_BAD // 2
"""Each may be two sequences of tokens."""

# Parameters of OpenAI's API that Quire does not implement, with the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "client_metadata": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprob_token_ids": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory",),
    "provider": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "transforms": ([],),
    "usage": ({"include": False},),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_HINTS = frozenset(
    {
        "client_metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider",
        "transforms",
        "usage",
    }
)


Word = Annotated[str, Field(min_length=1, max_length=256)]
Breaker = Annotated[str, Field(min_length=1, max_length=40)]


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`: token counts in every
    chunk, and at the end, as in vLLM."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StreamOptions:
        if self.continuous_usage_stats and self.include_usage is False:
            raise RequestError(
                "'continuous_usage_stats' excludes include_usage=false.",
                param="continuous_usage_stats",
            )
        return self


_DeclaredFields: Any = sampling_model(OPENAI)


class SamplingFields(StructuredFields, _DeclaredFields):  # type: ignore[misc]
    """Fields that all generating routes share.

    `SamplingParams` declares most of the sampling parameters. Those below have another form in a
    request than there.

    Null or absent means the model's default (see `ServerArgs.generation_config`), then that of
    `SamplingParams`. `user` and `safety_identifier` are opaque identifiers: accepted, not used.
    """

    model: Name | None = None
    stream: bool | None = None
    dry_sequence_breakers: (
        Annotated[list[Breaker], Field(max_length=MAX_BREAKERS, fail_fast=True)] | None
    ) = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP, fail_fast=True)] | None = None
    logit_bias: LogitBias | None = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[Count], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None
    ) = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=INT32_MAX)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        refused = {name: v for name, v in _UNSUPPORTED.items() if name not in cls.model_fields}
        return drop_unused(data, refused, _HINTS)

    @field_validator("stop", mode="before", json_schema_input_type=list[str] | str | None)
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _keeps_some(self) -> SamplingFields:
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "'truncate_prompt_tokens' must be -1 or at least 1.", param="truncate_prompt_tokens"
            )
        check_side(self.truncation_side, self.truncate_prompt_tokens)
        return self


class CompletionRequest(SamplingFields, BeamFields):
    """Body of `/v1/completions`.

    `prompt` is a string, token ids, or a list of either. An empty `suffix` is none, as at OpenAI.
    """

    prompt: TextsOrIds
    suffix: str | None = None
    max_tokens: Count | None = None
    n: int | None = Field(None, ge=1, le=128)
    request_id: RequestId | None = None
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=-1, le=INT32_MAX)
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class GenerateRequest(SamplingFields):
    """Body of `/generate`: one prompt, one text."""

    prompt: TextsOrIds
    max_tokens: Count | None = None


class ChatRequest(SamplingFields, BeamFields):
    """Body of `/v1/chat/completions`.

    `metadata` comes back with the answer. `prompt_cache_key` is an identifier, as `user` is: the
    prefix cache needs no key, and there is one server to route to. `verbosity` is for templates
    that take it; medium is OpenAI's word for none.
    """

    messages: Annotated[
        list[ChatMessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_tokens: Count | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    request_id: RequestId | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=20)
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    store: bool | None = None
    service_tier: ServiceTier | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    functions: (
        Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    function_call: FunctionChoice | None = None
    tools: Annotated[list[ChatToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        ToolChoice | None,
        BeforeValidator(parse_tool_choice, json_schema_input_type=ToolChoiceParam | None),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
