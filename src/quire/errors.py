"""Typed errors, and checks of values that raise them."""

from __future__ import annotations

import importlib.util
import math


class QuireError(Exception):
    """Base of every error Quire raises on purpose.

    Attributes:
        ends_call: Whether `LLM` raises the error of a request that has no tokens yet. Others end
            their request alone.
    """

    ends_call = False


class ConfigError(QuireError, ValueError):
    """A setting is wrong or contradicts another. `param` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(QuireError):
    """A model folder cannot be served: unknown architecture, missing or misshapen tensors."""


class RequestError(QuireError, ValueError):
    """A request is invalid. `param` names the field, `code` is machine-readable."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single new token within the model's context.

    Args:
        generates: whether the model generates. An encoder's prompt may be as long as the context.
    """

    def __init__(self, prompt_tokens: int, max_model_len: int, *, generates: bool = True) -> None:
        rest = ", of which at least one must be left for the answer" if generates else ""
        super().__init__(
            f"The prompt has {prompt_tokens} tokens, but this model's maximum context length is "
            f"{max_model_len} tokens{rest}.",
            param="prompt",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class RequestTooLargeError(RequestError):
    """The request could never run: it needs more KV blocks than the whole cache has."""

    def __init__(self, blocks_needed: int, blocks_total: int) -> None:
        super().__init__(
            f"The request may need {blocks_needed} KV cache blocks, but the cache has only "
            f"{blocks_total}. Lower max_tokens or the prompt, or give the cache more memory.",
            param="max_tokens",
            code="kv_cache_too_small",
        )


class RefusedError(RequestError):
    """A feature refused to admit the request (see `scheduler.feature.Feature.admit`)."""


class GrammarError(RequestError):
    """A schema, regular expression or grammar cannot be enforced.

    Attributes:
        pointer: JSON pointer of the keyword that cannot, or None.
    """

    ends_call = True

    def __init__(
        self,
        message: str,
        param: str | None = "structured_outputs",
        code: str | None = "invalid_grammar",
        pointer: str | None = None,
    ) -> None:
        super().__init__(message, param, code)
        self.pointer = pointer


class OverloadedError(QuireError):
    """The queue is full: the request may be sent again later."""


class CompilerBusyError(QuireError):
    """Other grammars are being compiled: the request may be sent again later."""

    ends_call = True


class WeightsError(QuireError):
    """An update of the weights has failed while it wrote. The engine serves nothing until an update
    with all of its tensors succeeds."""

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "An update of the weights has failed, so they are incomplete; nothing is served "
            "until another update succeeds."
        )


class BrokenLogitsError(QuireError):
    """A completion ended because a logit was not a number.

    Either the model's weights are damaged, or its values exceed the range of the dtype.
    """

    def __init__(self) -> None:
        super().__init__(
            "The model's output was not a number (NaN), so the answer ended: its weights are "
            "damaged, or its values passed the range of the dtype."
        )


class PeerMismatchError(QuireError):
    """Another engine's blocks do not fit this engine, or it is not the engine that was named."""


class EngineDeadError(QuireError):
    """The engine stopped; nothing can be served until it is started again."""


# Limits, and checks of users' values. Each check raises a RequestError that names the field.

MAX_STOP_TOKENS = 256
MAX_BIAS_ENTRIES = 1024


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r}", param=name)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)


def between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An int is always finite, and `math.isfinite` would fail on a very large one.
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if not (low < value <= high if open_low else low <= value <= high):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


def integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    between(name, value, low, high)


# Advice on optional packages.

NIXL = ("nixl_cu12", "nixl_cu13")
"""Modules of NIXL, one for each version of CUDA. Either works on a CPU."""


def installing(extra: str) -> str:
    """Returns how to install an extra. On PyPI, another project has the name."""
    return (
        f"install the extra '{extra}': pip install '.[{extra}]' in a checkout of Quire, or the "
        f"wheel of a release with [{extra}] behind its name"
    )


def require_nixl() -> str:
    """Returns the name of NIXL's module.

    Raises:
        ConfigError: it is not installed.
    """
    for name in NIXL:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ConfigError(
        f"transport=nixl needs the package nixl-cu12, or nixl-cu13: {installing('nixl')}",
        "transport",
    )


def generates_nothing_error() -> RequestError:
    """Returns the error for a request of new tokens from an encoder."""
    return RequestError(
        "this model is an encoder and generates no text: use /v1/embeddings, /score, /rerank or "
        "/classify",
        code="model_generates_nothing",
    )
