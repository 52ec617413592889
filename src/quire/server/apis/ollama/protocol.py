"""Bodies of Ollama's routes. Fields that are not listed here are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quire.errors import RequestError
from quire.sampling_params import OLLAMA
from quire.server.apis.openai.messages import FunctionDefinition
from quire.server.apis.sampling import sampling_model
from quire.server.context.hints import decline, refuses_hints
from quire.server.http.strict_model import INT32_MAX, Count, Name, StrictModel, drop_unused

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_STOP = 64
MAX_INPUTS = 2048
MAX_CALLS = 128
MAX_CONTEXT = 1_000_000
MAX_IMAGES = 1024
"""Most token ids of `context`."""

_LOADING = (
    "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_thread", "numa", "use_mlock", "use_mmap",
)  # fmt: skip
"""Options of how Ollama loads a model. The settings of `quire serve` decide this."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_LOADING, ()),
    "embedding_only": (False,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5.0,),
    "penalize_newline": (True,),
    "repeat_last_n": (-1,),
    "tfs_z": (1.0,),
    "vocab_only": (False,),
}
"""Options that Quire does not implement, with the values that mean "not used"."""
_HINTS = frozenset({*_LOADING, "mirostat_eta", "mirostat_tau", "penalize_newline", "repeat_last_n"})

_DeclaredFields: Any = sampling_model(OLLAMA)


class OllamaOptions(_DeclaredFields):  # type: ignore[misc]
    """`options`: sampling parameters. A negative `seed` or `num_predict` is none."""

    num_predict: int | None = Field(None, ge=-2, le=INT32_MAX)
    repeat_penalty: float | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP, fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return drop_unused(data, _UNSUPPORTED, _HINTS, "options.")

    @field_validator("stop", mode="before", json_schema_input_type=list[str] | str | None)
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class OllamaRequest(StrictModel):
    """Fields that all requests for answers share. `stream` is true by default."""

    model: Name
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    keep_alive: int | float | str | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @field_validator("options", mode="before")
    @classmethod
    def _without_nulls(cls, options: Any) -> Any:
        return options or None

    @model_validator(mode="after")
    def _decline(self) -> OllamaRequest:
        for name in ("truncate", "shift"):
            _decline_field(name, getattr(self, name) is True)
        check_keep_alive(self.keep_alive)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' needs logprobs=true.", param="top_logprobs")
        return self


def check_keep_alive(value: float | str | None) -> None:
    """Declines a time after which the model is unloaded. A negative one means never."""
    never = value is None or (
        value.strip().startswith("-") if isinstance(value, str) else value < 0
    )
    _decline_field("keep_alive", not never)


def _decline_field(name: str, given: bool) -> None:
    if given and refuses_hints():
        raise RequestError(
            f"'{name}' is not supported by this server.", name, code="unsupported_parameter"
        )
    if given:
        decline(name)


Images = Annotated[list[str], Field(max_length=MAX_IMAGES, fail_fast=True)]
"""Images in base64."""


class CalledTool(StrictModel):
    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Count | None = None
    description: str | None = None


class OllamaCall(StrictModel):
    function: CalledTool
    id: Name | None = None
    type: Literal["function"] | None = None


class OllamaMessage(StrictModel):
    """A message. `tool_name` or `tool_call_id` says which call a result answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = (
        None
    )
    tool_name: Name | None = None
    name: Name | None = None
    tool_call_id: Name | None = None


class OllamaTool(StrictModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition
    items: Any = None


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = (
        Field(default_factory=list)
    )
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of `/api/generate`.

    `raw` passes the prompt to the model as it is. `context` has the token ids of an earlier answer.
    """

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[Count], Field(max_length=MAX_CONTEXT, fail_fast=True)] | None = None
    raw: bool | None = None
    images: Images | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("prompt", "") is None:
            data = {name: value for name, value in data.items() if name != "prompt"}
        unused = {"template": ("",), "width": (0,), "height": (0,), "steps": (0,)}
        return drop_unused(data, unused)

    @model_validator(mode="after")
    def _apart(self) -> OllamaGenerateRequest:
        for name in ("system", "context", "think", "suffix", "images"):
            if self.raw and getattr(self, name):
                raise RequestError(f"'raw' and '{name}' exclude each other.", param=name)
        for name in ("system", "context", "think", "images"):
            if self.suffix and getattr(self, name):
                raise RequestError(f"'suffix' and '{name}' exclude each other.", param=name)
        return self


class OllamaEmbedRequest(StrictModel):
    """Body of `/api/embed`. Inputs that are too long are truncated, unless `truncate` is false."""

    model: Name
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=0, le=INT32_MAX)
    options: OllamaOptions | None = None
    keep_alive: int | float | str | None = None

    @model_validator(mode="after")
    def _decline(self) -> OllamaEmbedRequest:
        check_keep_alive(self.keep_alive)
        return self


class OllamaEmbeddingsRequest(StrictModel):
    """Body of `/api/embeddings`, the older route with one prompt."""

    model: Name
    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: int | float | str | None = None

    @model_validator(mode="after")
    def _decline(self) -> OllamaEmbeddingsRequest:
        check_keep_alive(self.keep_alive)
        return self


class _NamedModel(StrictModel):
    """A body about a model. `name` is an older name of `model`."""

    model: Name | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _something_named(self) -> Self:
        if not (self.model or self.name):
            raise RequestError(
                "Missing required parameter: 'model'.", "model", code="missing_required_parameter"
            )
        return self

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class OllamaPullRequest(_NamedModel):
    """Body of `/api/pull`. `stream` is true by default."""

    insecure: bool | None = None
    stream: bool | None = None


class OllamaShowRequest(_NamedModel):
    """Body of `/api/show`."""

    verbose: bool | None = None
