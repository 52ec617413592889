"""Base model and field types of request bodies.

Types must match exactly. Unknown fields are refused by name, unless they are null.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from quire.errors import MAX_BIAS_ENTRIES, RequestError
from quire.features.call import RequestField
from quire.features.registry import clash_error, origin_of_field
from quire.server.context.hints import decline, refuses_hints

INT32_MAX = 2**31 - 1

_MANY_FIELDS = 256
"""A number that is larger than the number of fields of any model."""

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Name = Annotated[str, Field(max_length=512)]
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
RequestId = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}\z")]
"""A request id that the client has chosen."""


def _check_bias(bias: Any) -> Any:
    """Checks a map from token ids to numbers; raises the first error."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > MAX_BIAS_ENTRIES:
        raise RequestError(f"it has {len(bias)} entries, at most {MAX_BIAS_ENTRIES} are allowed.")
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise RequestError(
                f"it maps token ids to numbers, and {token[:40]!r} is not a token id."
            )
        if type(value) not in (int, float):
            raise RequestError(f"the bias of token {token} must be a number.")
    return bias


# Variables that the server or the tokenizer itself passes to the chat template.
_RESERVED_KWARGS = frozenset(
    {
        "self",
        "messages",
        "add_generation_prompt",
        "chat_template",
        "tools",
        "documents",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
    }
)


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise RequestError(f"'{name[:100]}' cannot be set through 'chat_template_kwargs'.")
    return kwargs


LogitBias = Annotated[dict[str, float], BeforeValidator(_check_bias)]
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_template_kwargs)]
"""Further variables of the chat template."""


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError("keys have at most 64 characters and values at most 512.")
    return metadata


Metadata = Annotated[dict[str, str], Field(max_length=16), AfterValidator(_check_metadata)]


def _check_prompts(value: Any) -> Any:
    """Checks the shape of prompts; raises the first error."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_list_of_prompts(value)):
        return value
    raise RequestError(
        f"it must be a string, a list of token ids (integers from 0 to {INT32_MAX}), or a "
        "non-empty list of either."
    )


def _is_list_of_prompts(value: list[Any]) -> bool:
    if type(value[0]) is int:
        return _is_ids(value)
    return all(
        isinstance(item, str) or (isinstance(item, list) and _is_ids(item)) for item in value
    )


def _is_ids(items: list[Any]) -> bool:
    # A prompt may have many thousands of ids. `map`, `min` and `max` loop in C, so that other
    # requests wait less.
    return set(map(type, items)) == {int} and 0 <= min(items) <= max(items) <= INT32_MAX


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
TextsOrIds = Annotated[
    Any,
    AfterValidator(_check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_IDS, "minItems": 1},
                {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _IDS]}},
            ]
        }
    ),
]
"""A string, token ids, or a non-empty list of either. `convert.prompts_of` reads it."""


def _check_tier(tier: str) -> str:
    if tier in ("auto", "default"):
        return tier
    if refuses_hints():
        raise RequestError(
            f"{tier[:40]!r} is not supported; known are auto and default.",
            code="unsupported_parameter",
        )
    decline("service_tier")
    return "default"


ServiceTier = Annotated[str, Field(max_length=64), AfterValidator(_check_tier)]
"""The server has only the default tier. Any other one is declined as a hint."""

TruncationSide = Literal["left", "right"]
"""The side of a prompt on which `truncate_prompt_tokens` drops tokens."""


def check_side(side: TruncationSide | None, truncate: int | None) -> None:
    """Refuses a truncation side without a truncation."""
    if side is not None and truncate is None:
        raise RequestError(
            "'truncation_side' needs 'truncate_prompt_tokens'.", param="truncation_side"
        )


def cut_prompt(ids: list[int], most: int | None, side: TruncationSide | None) -> list[int]:
    """Truncates a prompt.

    Args:
        most: number of tokens to keep; None keeps all.
        side: side on which tokens are dropped; None means left.
    """
    if most is None:
        return ids
    return ids[:most] if side == "right" else ids[-most:]


class StrictModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    feature_fields: ClassVar[Mapping[str, RequestField[Any]]] = {}
    """The fields that features declare, by key."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for key in cls.feature_fields.keys() & vars(cls).get("__annotations__", {}).keys():
            origin = origin_of_field(cls.feature_fields[key])
            raise clash_error("request field", key, "the server", origin)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, data: Any) -> Any:
        """Drops unknown fields that are null, because they request nothing."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        aliases = {field.alias for field in cls.model_fields.values()}
        return {
            name: value
            for name, value in data.items()
            if value is not None or name in cls.model_fields or name in aliases
        }

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_unknown(cls, data: Any) -> Any:
        """Refuses a body with very many fields at its first unknown one.

        pydantic would make an error for each of them.
        """
        if isinstance(data, dict) and len(data) > _MANY_FIELDS:
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in data if name not in known), None)
            if unknown is not None:
                raise RequestError(
                    f"Unknown parameter: '{unknown[:100]}'.",
                    param=unknown[:100],
                    code="unknown_parameter",
                )
        return data


def drop_unused(
    data: Any, unsupported: Mapping[str, tuple[Any, ...]], hints: Collection[str] = (), at: str = ""
) -> Any:
    """Returns `data` without the fields of an API that are not implemented.

    Args:
        unsupported: maps each such field to the values that mean "not used". Clients send these
            values by default, so they are accepted. Any other value is an error, because ignoring
            it would make the answer wrong.
        hints: the fields among them whose other values are declined instead, see `hints`.
        at: the path of the object that has the fields, ending in a dot.
    """
    if not isinstance(data, dict):
        return data
    for name in unsupported.keys() & data.keys():
        if data[name] is not None and data[name] not in unsupported[name]:
            if name in hints and not refuses_hints():
                decline(at + name)
                continue
            raise RequestError(
                f"'{name}' is not supported by this server.",
                param=name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in data.items() if name not in unsupported}
