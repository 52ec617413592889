"""Parameters of sampling, as users give them. Names and meanings are vLLM's and OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Literal

import msgspec

from quire.errors import RequestError

MAX_LOGPROBS = 100
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 256
MAX_BIAS_ENTRIES = 1024
MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: logits divided by them might pass the range of float32."""

_INT32_MAX = 2**31 - 1
_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize",
)  # fmt: skip


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says what a completion's text must match; exactly one field is set. Names are vLLM's.

    Attributes:
        json: a JSON Schema, as JSON text; an object becomes text.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: a grammar in llguidance's dialect of Lark (which may embed schemas with `%json`).
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        given = [self.json, self.json_object or None, self.regex, self.choice or None, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise RequestError(
                "structured outputs need exactly one of json, json_object, regex, choice and "
                "grammar",
                param="structured_outputs",
            )

    def _check_types(self) -> None:
        if isinstance(self.json, dict | bool):
            msgspec.structs.force_setattr(self, "json", msgspec.json.encode(self.json).decode())
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong_type(name, "a string", value)
        _flag("json_object", self.json_object)
        choice: object = self.choice
        if not isinstance(choice, list | tuple) or not all(isinstance(c, str) for c in choice):
            raise _wrong_type("choice", "a list of strings", choice)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    Every numeric field is checked to be finite and within bounds on construction; a violation is a
    `RequestError` whose `param` names the field.

    Attributes:
        n: completions per prompt; they share the prompt's KV blocks.
        temperature: 0, or less than `MIN_TEMPERATURE`, means greedy.
        top_k: 0 or -1 keeps all tokens.
        top_p, min_p: nucleus and minimum-probability (relative to the likeliest token) truncation.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens.
        repetition_penalty: CTRL's (Keskar et al., 2019), over prompt and generated tokens.
        seed: same seed, same request, same tokens. None lets the engine draw one.
        stop: strings that end the completion; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end it, besides the model's end-of-sequence ids.
        ignore_eos: generate past the model's end-of-sequence ids.
        max_tokens: None means as many as the context holds.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many.
        logprobs: number of most likely alternatives to return per token (the sampled one is always
            included); None returns none; -1 is refused (a whole vocabulary per token).
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id to additive bias.
        allowed_token_ids: all other tokens are never sampled; none given: all are allowed.
        bad_token_ids: sequences of tokens whose last token is not sampled behind the others. Only
            generated tokens count.
        skip_special_tokens, spaces_between_special_tokens: detokenization.
        detokenize: False leaves `text` empty; stop strings are then refused.
        structured_outputs: what the text must match; a dict becomes `StructuredOutputsParams`.
        speculative: "off" verifies no drafts for it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    speculative: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        self._check_stops()
        self._check_bias()
        if self.allowed_token_ids or self.bad_token_ids:
            from quire.token_rules import check_token_rules

            check_token_rules(self.allowed_token_ids, self.bad_token_ids)

    def _normalize(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple | set | frozenset):
                raise _wrong_type(name, "a list", value)
            if not isinstance(value, tuple):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        if self.speculative not in ("auto", "off"):
            raise _wrong_type("speculative", "auto or off", self.speculative)
        given: object = self.structured_outputs
        if isinstance(given, dict):
            params = _structured_outputs(given)
            msgspec.structs.force_setattr(self, "structured_outputs", params)
        elif given is not None and not isinstance(given, StructuredOutputsParams):
            raise _wrong_type("structured_outputs", "StructuredOutputsParams or a dict", given)

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _between("temperature", self.temperature, 0.0, 100.0)
        if self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens "
                    f"({self.max_tokens})",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        _at_most("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string must be a string of 1 to {MAX_STOP_LENGTH} characters",
                    param="stop",
                )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, _INT32_MAX)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise _wrong_type("logit_bias", "a dict of token ids and numbers", self.logit_bias)
        _at_most("logit_bias", self.logit_bias, MAX_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, _INT32_MAX)
            _between("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether token counts must be kept for this request."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def masked(self) -> bool:
        """Whether the host says which tokens may come next."""
        rules = self.allowed_token_ids or self.bad_token_ids
        return self.structured_outputs is not None or bool(rules)


def _structured_outputs(given: dict[object, object]) -> StructuredOutputsParams:
    for name in given:
        if name not in StructuredOutputsParams.__struct_fields__:
            raise RequestError(
                f"structured_outputs has no field {name!r}; known are: "
                f"{', '.join(StructuredOutputsParams.__struct_fields__)}",
                param="structured_outputs",
            )
    return StructuredOutputsParams(**given)  # type: ignore[arg-type]


def _wrong_type(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r}", param=name)


def _at_most(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries, at most {most} are allowed", name)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong_type(name, "true or false", value)


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An int is finite, however large; asking a very large one would overflow a float.
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if not (low < value <= high if open_low else low <= value <= high):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    _between(name, value, low, high)
