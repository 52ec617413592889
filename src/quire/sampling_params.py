"""Parameters of sampling, as users give them. Names and meanings are vLLM's and OpenAI's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.checks import between, flag, integer, wrong_type
from quire.errors import RequestError

MAX_LOGPROBS = 100
MAX_N = 128
MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: logits divided by them might pass the range of float32."""

_INT32_MAX = 2**31 - 1
_LISTS = (
    "stop", "stop_token_ids", "allowed_token_ids", "bad_token_ids", "dry_breaker_ids",
    "logits_processors",
)  # fmt: skip
_RANGES = {
    "temperature": (0.0, 100.0), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0), "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 100.0), "dry_base": (1.0, 16.0),
}  # fmt: skip
_ABOVE_0 = {"top_p": 1.0, "repetition_penalty": 100.0, "typical_p": 1.0}
_INTEGERS = {
    "n": (1, MAX_N), "top_k": (-1, _INT32_MAX), "min_tokens": (0, _INT32_MAX),
    "dry_allowed_length": (1, _INT32_MAX), "dry_penalty_last_n": (-1, _INT32_MAX),
}  # fmt: skip
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
                raise wrong_type(name, "a string", value)
        flag("json_object", self.json_object)
        choice: object = self.choice
        if not isinstance(choice, list | tuple) or not all(isinstance(c, str) for c in choice):
            raise wrong_type("choice", "a list of strings", choice)


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
        typical_p: keeps the tokens whose surprise is closest to the expected one, up to this much
            probability (Meister et al., 2023); 1 keeps all.
        xtc_probability: how often all tokens but the least likely of those of `xtc_threshold` and
            more are left out ("exclude top choices"); 0: never.
        xtc_threshold: above 0.5 there is never a choice to leave out.
        dry_multiplier: weight of the penalty on tokens that would repeat a sequence of the text
            ("don't repeat yourself"); 0: none. The penalty is `dry_base` to the power of what the
            sequence is longer than `dry_allowed_length`, times this.
        dry_penalty_last_n: the last tokens that are looked at; -1: all.
        dry_breaker_ids: tokens over which no sequence goes on.
        logits_processors: functions of the generated tokens (a list) and the logits (float32
            [vocab]) that return logits; in the caller's process only. They cost a wait for the
            device at every step.
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
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breaker_ids: tuple[int, ...] = ()
    logits_processors: tuple[Any, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    speculative: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        if any(getattr(self, name) for name in _LISTS) or self.logit_bias is not None:
            from quire.sampling_checks import check_lists

            check_lists(self)

    def _normalize(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in _LISTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple | set | frozenset):
                raise wrong_type(name, "a list", value)
            if not isinstance(value, tuple):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        for name in _FLAGS:
            flag(name, getattr(self, name))
        if self.speculative not in ("auto", "off"):
            raise wrong_type("speculative", "auto or off", self.speculative)
        given: object = self.structured_outputs
        if isinstance(given, dict):
            from quire.sampling_checks import check_structured

            check_structured(given, StructuredOutputsParams.__struct_fields__)
            params = StructuredOutputsParams(**given)
            msgspec.structs.force_setattr(self, "structured_outputs", params)
        elif given is not None and not isinstance(given, StructuredOutputsParams):
            raise wrong_type("structured_outputs", "StructuredOutputsParams or a dict", given)

    def _check_ranges(self) -> None:
        for name, (low, high) in _RANGES.items():
            between(name, getattr(self, name), low, high)
        for name, high in _ABOVE_0.items():
            between(name, getattr(self, name), 0.0, high, open_low=True)
        for name, (least, most) in _INTEGERS.items():
            integer(name, getattr(self, name), least, most)
        if self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens "
                    f"({self.max_tokens})",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether token counts must be kept for this request."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def reshapes(self) -> bool:
        """Whether the distribution is changed by what no graph holds."""
        extra = self.typical_p < 1.0, self.xtc_probability, self.dry_multiplier
        return any(extra) or bool(self.logits_processors)

    @property
    def masked(self) -> bool:
        """Whether the host says which tokens may come next."""
        rules = self.allowed_token_ids or self.bad_token_ids
        return self.structured_outputs is not None or bool(rules)
