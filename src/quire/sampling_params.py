"""Parameters of sampling, as users give them, and their checks."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import numpy as np

from quire.arrays import Int32
from quire.errors import (
    MAX_BIAS_ENTRIES,
    MAX_STOP_TOKENS,
    RequestError,
    between,
    flag,
    integer,
    wrong_type,
)

MAX_ALLOWED = 100_000
"""Most `allowed_token_ids`."""
MAX_BAD = 256
"""Most sequences of `bad_token_ids`."""
MAX_BAD_LENGTH = 64
"""Most tokens of a sequence of `bad_token_ids`."""


def check_token_rules(allowed: Sequence[int], bad: Sequence[Sequence[int]]) -> None:
    """Checks `allowed_token_ids` and `bad_token_ids`, except against the vocabulary's size.

    Raises:
        RequestError: a value is wrong; `param` names the field.
    """
    if len(allowed) > MAX_ALLOWED:
        raise _too_many("allowed_token_ids", len(allowed), MAX_ALLOWED)
    _check_ids("allowed_token_ids", allowed)
    if len(bad) > MAX_BAD:
        raise _too_many("bad_token_ids", len(bad), MAX_BAD)
    for tokens in bad:
        if not isinstance(tokens, list | tuple) or not 1 <= len(tokens) <= MAX_BAD_LENGTH:
            raise RequestError(
                f"bad_token_ids must be lists of 1 to {MAX_BAD_LENGTH} token ids, got "
                f"{reprlib.repr(tokens)}",
                "bad_token_ids",
            )
        _check_ids("bad_token_ids", tokens)


def _too_many(name: str, count: int, most: int) -> RequestError:
    return RequestError(f"{name} has {count} entries, at most {most} are allowed", name)


def _check_ids(name: str, ids: Iterable[object]) -> None:
    for id in ids:
        if type(id) is not int or not 0 <= id < 2**31:
            raise RequestError(f"{name} must be token ids (integers from 0), got {id!r}", name)


class TokenRules:
    """Clears the bits of tokens that may not come from masks.

    Args:
        allowed: the tokens that may come; none: all.
        bad: sequences whose last token may not come behind the others.
        vocab_size: tokens of the model.

    Raises:
        RequestError: a token is outside of the vocabulary, or none may ever come.
    """

    def __init__(
        self, allowed: Sequence[int], bad: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        for name, lists in (("allowed_token_ids", [allowed]), ("bad_token_ids", bad)):
            last = max((max(ids, default=0) for ids in lists), default=0)
            if last >= vocab_size:
                raise RequestError(
                    f"{name} has token id {last}, but the vocabulary ends at {vocab_size - 1}", name
                )
        free = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        free[list(allowed) if allowed else slice(None, vocab_size)] = 1
        free[[tokens[0] for tokens in bad if len(tokens) == 1]] = 0
        if not free.any():
            name = "allowed_token_ids" if allowed else "bad_token_ids"
            raise RequestError(f"{name} bars all {vocab_size} tokens of the vocabulary", name)
        self._free: Int32 = np.packbits(free, bitorder="little").view(np.int32)
        self._behind: dict[int, list[tuple[list[int], int]]] = {}
        """By the token before the last: the tokens before the last, and the last."""
        for tokens in bad:
            if len(tokens) > 1:
                rule = list(tokens[:-1]), tokens[-1]
                self._behind.setdefault(tokens[-2], []).append(rule)
        self.reach = max((len(tokens) - 1 for tokens in bad), default=0)
        """Tokens before a place that decide about it."""

    @property
    def words(self) -> int:
        """Words of a mask."""
        return len(self._free)

    def hold(self, tokens: Sequence[int], before: Sequence[int]) -> bool:
        """Whether each of some tokens may come behind those before it. before: the last generated
        tokens, `reach` of them or all."""
        text = [*before, *tokens]
        for place, token in enumerate(tokens, len(before)):
            if not self._free[token >> 5] >> (token & 31) & 1:
                return False
            for head, last in self._behind.get(text[place - 1], ()) if place else ():
                if last == token and text[max(0, place - len(head)) : place] == head:
                    return False
        return True

    def apply(self, mask: Int32, before: list[int]) -> None:
        """Clears bits of a mask, int32 [ceil(vocab / 32)].

        Args:
            before: the last generated tokens, `reach` of them or all.
        """
        mask &= self._free
        for tokens, last in self._behind.get(before[-1], ()) if before else ():
            if before[-len(tokens) :] == tokens:
                mask[last >> 5] &= ~np.uint32(1 << (last & 31)).view(np.int32)


# Checks of sampling parameters that few requests have, imported by the first that has one.

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
_INT32_MAX = 2**31 - 1


def check_lists(params: Any) -> None:
    """Checks the lists of `SamplingParams`. Raises RequestError naming the field."""
    _check_stops(params.stop, params.detokenize)
    for name, entries, low, high in _INTEGER_LISTS:
        numbers: Sequence[int] = getattr(params, name)
        _at_most(name, numbers, entries)
        for number in numbers:
            integer(name, number, low, high)
    if params.logit_bias is not None:
        _check_bias(params.logit_bias)
    if not all(map(callable, params.logits_processors)):
        raise wrong_type("logits_processors", "a list of functions", params.logits_processors)
    check_token_rules(params.allowed_token_ids, params.bad_token_ids)


def _check_stops(stop: Sequence[object], detokenize: bool) -> None:
    _at_most("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string must be a string of 1 to {MAX_STOP_LENGTH} characters, got "
                f"{reprlib.repr(text)}",
                param="stop",
            )
    if stop and not detokenize:
        raise RequestError("stop strings need detokenize=True", param="stop")


def _check_bias(bias: object) -> None:
    if not isinstance(bias, dict):
        raise wrong_type("logit_bias", "a dict of token ids and numbers", bias)
    _at_most("logit_bias", bias, MAX_BIAS_ENTRIES)
    for token, value in bias.items():
        integer("logit_bias", token, 0, _INT32_MAX)
        between("logit_bias", value, -100.0, 100.0)


def check_structured(given: dict[object, object], fields: Collection[str]) -> None:
    """Checks the names of a dict of structured outputs. Raises RequestError."""
    for name in given:
        if name not in fields:
            raise RequestError(
                f"structured_outputs has no field {name!r}; known are: {', '.join(fields)}",
                param="structured_outputs",
            )


def _at_most(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries, at most {most} are allowed", name)


# Parameters of sampling, as users give them. Names and meanings are vLLM's and OpenAI's.

MAX_LOGPROBS = 100
MAX_N = 128
MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: logits divided by them might pass the range of float32."""

OPENAI = "openai"
"""Completions, chat completions, `/generate`, and batches of them."""
RESPONSES = "responses"
ANTHROPIC = "anthropic"
OLLAMA = "ollama"
"""`options` of Ollama's API."""
_OPEN_APIS = (OPENAI, RESPONSES)
_OPTIONS_TOO = (OPENAI, RESPONSES, OLLAMA)
_EVERY_API = (OPENAI, RESPONSES, ANTHROPIC, OLLAMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Declares the values of a field of `SamplingParams`, and the requests that may set it.

    The field's type, its default and its text in the class's docstring say the rest. From all this
    come the field's checks, the request fields of the APIs and the copying from them, the flags of
    `quire chat`, the form of the playground and the table in `docs/api.md`.
    `docs/adding-a-sampling-parameter.md` shows how. A field without one is set under its own rules.

    Attributes:
        low: least number, of each entry if the field is a list.
        high: greatest number.
        above_low: whether the number must be greater than `low`.
        entries: most entries of a list; 0: the field is no list.
        apis: the APIs whose requests have a field of this name and type.
        from_model: whether a model's `generation_config.json` may set the default.
        in_beam_search: whether a beam search takes or ignores it. If not, only null, the default
            and `neutral` values are allowed.
        neutral: further values without an effect, or without an effect in a beam search.
        sampler: whether any value but the default needs the hook of `features/samplers`. That hook
            runs outside of CUDA graphs.
        flag: whether `quire chat` and `quire generate` have a flag for it. `--help` shows a
            "common" one, only `--help-all` a "rare" one.
        step: amount by which the arrows of its field in the playground change it. With 0 the
            playground has no field for it.
    """

    low: Any = None
    high: Any = None
    above_low: bool = False
    entries: int = 0
    apis: tuple[str, ...] = ()
    from_model: bool = False
    in_beam_search: bool = False
    neutral: tuple[float, ...] = ()
    sampler: bool = False
    flag: Literal["common", "rare"] | None = None
    step: float = 0


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rule that a completion's text must match. Exactly one field is set. Names are vLLM's.

    Attributes:
        json: a JSON Schema, as JSON text. An object is turned into text.
        json_object: the text must be a JSON object.
        regex: a regular expression that the whole text must match.
        choice: strings; the text must be one of them.
        grammar: a grammar in llguidance's dialect of Lark, which may embed schemas with `%json`.
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

    Attributes:
        n: completions per prompt. They share the prompt's KV blocks.
        temperature: divides the logits; 0 is greedy. Less than 1e-5 is greedy too.
        top_k: keep this many of the likeliest tokens. Values 0 and -1 keep all.
        top_p: keep the likeliest tokens up to this total probability (nucleus sampling).
        min_p: keep tokens with at least this probability, relative to the likeliest token's.
        presence_penalty: subtracted from the logits of tokens that were generated (OpenAI's).
        frequency_penalty: subtracted from a token's logit for each time that it was generated
            (OpenAI's).
        repetition_penalty: above 1, makes tokens of the prompt and of the output less likely (CTRL,
            Keskar et al., 2019).
        seed: the same request with the same seed gives the same tokens. Without one the engine
            draws it.
        stop: strings that end the completion. They are not part of the text, unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end the completion, besides the model's end-of-sequence ids.
        include_stop_str_in_output: keep the stop string that ends the completion in the text.
        ignore_eos: generate past the model's end-of-sequence ids.
        max_tokens: most tokens to generate; without a limit, as many as the context holds.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many tokens.
        logprobs: how many of the likeliest tokens to return per position. The sampled token is
            always included. None: no logprobs. -1, the whole vocabulary, is refused.
        logprobs_mode: what `logprobs` are. "raw" values are of the model's own logits, "processed"
            values of the distribution from which tokens are drawn. Its other tokens have no entry.
            "auto" is the engine's `logprobs_mode`.
        prompt_logprobs: the same for the prompt's tokens, always of the model's own logits.
        return_sampling_info: return both log-probabilities of each sampled token, and the number of
            tokens that could be drawn.
        return_routed_experts: return the experts of each token. The engine must have
            `enable_return_routed_experts`.
        logit_bias: additive bias by token id.
        allowed_token_ids: only these tokens may be sampled. An empty list allows all.
        bad_token_ids: sequences of tokens that may not be generated.
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this total
            probability (Meister et al., 2023); 1 keeps all.
        xtc_probability: probability with which a position excludes top choices. Only the least
            likely of the tokens with a probability of at least `xtc_threshold` then stays.
        xtc_threshold: least probability of a top choice. Above 0.5 no token is ever excluded.
        dry_multiplier: weight of the penalty on tokens that would repeat a sequence of the text
            ("don't repeat yourself"); 0 turns it off. The penalty is this weight times `dry_base`
            to the power of the sequence's length minus `dry_allowed_length`.
        dry_base: base of that power.
        dry_allowed_length: shorter sequences cost nothing. No sequence counts as longer than 50.
        dry_penalty_last_n: search only so many last tokens for the sequence; -1: all.
        dry_breaker_ids: tokens that end a sequence.
        logits_processors: functions of the generated tokens (a list) and the logits (float32
            [vocab]) that return logits. Only in the caller's process. Every step then waits for
            the device.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: changes nothing, because a `tokenizer.json` puts its own
            spaces.
        detokenize: False leaves `text` empty; stop strings are then refused.
        structured_outputs: the rule that the text must match; a dict becomes
            `StructuredOutputsParams`.
        speculative: "off" verifies no drafts for this request.

    Raises:
        RequestError: a field has the wrong type, is not finite or out of bounds; `param` names it.
    """

    n: Annotated[int, Parameter(low=1, high=MAX_N)] = 1
    temperature: Annotated[
        float,
        Parameter(
            low=0.0,
            high=100.0,
            apis=_EVERY_API,
            from_model=True,
            neutral=(0.0,),
            flag="common",
            step=0.1,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            low=0.0,
            high=1.0,
            above_low=True,
            apis=_EVERY_API,
            from_model=True,
            flag="common",
            step=0.05,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            low=-1,
            high=_INT32_MAX,
            apis=_EVERY_API,
            from_model=True,
            neutral=(-1,),
            flag="rare",
            step=1,
        ),
    ] = 0
    min_p: Annotated[
        float,
        Parameter(low=0.0, high=1.0, apis=_OPTIONS_TOO, from_model=True, flag="rare", step=0.01),
    ] = 0.0
    presence_penalty: Annotated[
        float, Parameter(low=-2.0, high=2.0, apis=_OPTIONS_TOO, step=0.1)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Parameter(low=-2.0, high=2.0, apis=_OPTIONS_TOO, step=0.1)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            low=0.0,
            high=100.0,
            above_low=True,
            apis=_OPEN_APIS,
            from_model=True,
            flag="rare",
            step=0.05,
        ),
    ] = 1.0
    seed: Annotated[
        int | None,
        Parameter(low=-(2**63), high=2**63 - 1, apis=_OPTIONS_TOO, in_beam_search=True, step=1),
    ] = None
    stop: Annotated[tuple[str, ...], Parameter(flag="rare")] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Parameter(
            low=0, high=_INT32_MAX, entries=MAX_STOP_TOKENS, apis=_OPEN_APIS, in_beam_search=True
        ),
    ] = ()
    include_stop_str_in_output: Annotated[bool, Parameter(apis=(OPENAI,), in_beam_search=True)] = (
        False
    )
    ignore_eos: Annotated[bool, Parameter(apis=_OPEN_APIS, in_beam_search=True)] = False
    max_tokens: Annotated[int | None, Parameter(low=1, high=_INT32_MAX, flag="common", step=1)] = 16
    min_tokens: Annotated[int, Parameter(low=0, high=_INT32_MAX, apis=_OPEN_APIS, step=1)] = 0
    logprobs: Annotated[int | None, Parameter(low=0, high=MAX_LOGPROBS)] = None
    logprobs_mode: Annotated[
        Literal["auto", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        Parameter(apis=(OPENAI,)),
    ] = "auto"
    prompt_logprobs: Annotated[int | None, Parameter(low=0, high=MAX_LOGPROBS)] = None
    return_sampling_info: Annotated[bool, Parameter(apis=(OPENAI,))] = False
    return_routed_experts: Annotated[bool, Parameter(apis=(OPENAI,))] = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    typical_p: Annotated[
        float, Parameter(low=0.0, high=1.0, above_low=True, apis=(OPENAI, OLLAMA), sampler=True)
    ] = 1.0
    xtc_probability: Annotated[
        float, Parameter(low=0.0, high=1.0, apis=(OPENAI,), sampler=True)
    ] = 0.0
    xtc_threshold: Annotated[
        float, Parameter(low=0.0, high=1.0, apis=(OPENAI,), in_beam_search=True)
    ] = 0.1
    dry_multiplier: Annotated[
        float, Parameter(low=0.0, high=100.0, apis=(OPENAI,), sampler=True)
    ] = 0.0
    dry_base: Annotated[
        float, Parameter(low=1.0, high=16.0, apis=(OPENAI,), in_beam_search=True)
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Parameter(low=1, high=_INT32_MAX, apis=(OPENAI,), in_beam_search=True)
    ] = 2
    dry_penalty_last_n: Annotated[
        int, Parameter(low=-1, high=_INT32_MAX, apis=(OPENAI,), in_beam_search=True)
    ] = -1
    dry_breaker_ids: Annotated[
        tuple[int, ...], Parameter(low=0, high=_INT32_MAX, entries=MAX_STOP_TOKENS)
    ] = ()
    logits_processors: Annotated[tuple[Any, ...], Parameter(sampler=True)] = ()
    skip_special_tokens: Annotated[bool, Parameter(apis=(OPENAI,), in_beam_search=True)] = True
    spaces_between_special_tokens: Annotated[
        bool, Parameter(apis=(OPENAI,), in_beam_search=True)
    ] = True
    detokenize: Annotated[bool, Parameter()] = True
    structured_outputs: StructuredOutputsParams | None = None
    speculative: Annotated[
        Literal["auto", "off"], Parameter(apis=_OPEN_APIS, in_beam_search=True)
    ] = "auto"

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        if any(getattr(self, name) for name in _LISTS) or self.logit_bias is not None:
            check_lists(self)
        if self.return_sampling_info or self.logprobs_mode != "auto":
            self._check_scores()

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
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise wrong_type(name, " or ".join(words), getattr(self, name))
        given: object = self.structured_outputs
        if isinstance(given, dict):
            check_structured(given, StructuredOutputsParams.__struct_fields__)
            params = StructuredOutputsParams(**given)
            msgspec.structs.force_setattr(self, "structured_outputs", params)
        elif given is not None and not isinstance(given, StructuredOutputsParams):
            raise wrong_type("structured_outputs", "StructuredOutputsParams or a dict", given)

    def _check_ranges(self) -> None:
        for name, low, high, above_low in _NUMBERS:
            between(name, getattr(self, name), low, high, open_low=above_low)
        for name, low, high in _INTEGERS:
            integer(name, getattr(self, name), low, high)
        for name, low, high in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            if value is not None:
                integer(name, value, low, high)
        if self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

    def _check_scores(self) -> None:
        """Raises RequestError if the values that the request asks for do not go together."""
        if self.return_sampling_info and self.logprobs_mode in ("raw_logits", "processed_logits"):
            raise RequestError(
                f"return_sampling_info gives log-probabilities, but logprobs_mode is "
                f"{self.logprobs_mode}",
                "logprobs_mode",
            )
        if self.reshapes and self.processed_logprobs is not None:
            raise RequestError(
                "processed log-probabilities are not available with DRY, XTC, typical_p or "
                "logits_processors, which draw tokens outside of the sampler",
                "return_sampling_info" if self.return_sampling_info else "logprobs_mode",
            )

    @property
    def raw_logprobs(self) -> int | None:
        """Number of alternatives that the device returns with log-probabilities under the model's
        own logits. None: it returns no such values."""
        if self.logprobs_mode in ("auto", "raw_logprobs") and self.logprobs is not None:
            return self.logprobs
        return 0 if self.return_sampling_info else None

    @property
    def processed_logprobs(self) -> int | None:
        """Number of alternatives with values of other modes than raw_logprobs. None: no such
        values."""
        if self.logprobs_mode not in ("auto", "raw_logprobs") and self.logprobs is not None:
            return self.logprobs
        return 0 if self.return_sampling_info else None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from the likely ones only."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether token counts must be kept for this request."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def reshapes(self) -> bool:
        """Whether any field needs a sampler that graphs are not captured with."""
        return any(getattr(self, name) != default for name, default in _SAMPLERS)

    @property
    def masked(self) -> bool:
        """Whether the host makes masks of the allowed tokens."""
        rules = self.allowed_token_ids or self.bad_token_ids
        return self.structured_outputs is not None or bool(rules)


class DeclaredParameter(NamedTuple):
    """A field of `SamplingParams` with its declaration.

    Attributes:
        kind: its type, without None.
        optional: whether it may be None.
        text: what it does, from the docstring of `SamplingParams`.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    declared: Parameter
    text: str

    @property
    def summary(self) -> str:
        """The first sentence of its text, for people who do not write Python."""
        first = re.split(r"(?<=\.)\s", self.text, maxsplit=1)[0].replace("`", "")
        return first[:1].upper() + first[1:]


def _attribute_texts(docstring: str) -> dict[str, str]:
    """Returns the text of each attribute that a class's docstring describes."""
    text = inspect.cleandoc(docstring)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _declared_parameters(params: type[msgspec.Struct]) -> tuple[DeclaredParameter, ...]:
    found = []
    # Python leaves docstrings out under -OO: flags then have no help.
    texts = _attribute_texts(params.__doc__ or "")
    for field in msgspec.structs.fields(params):
        if get_origin(field.type) is Annotated:
            kind, declared = get_args(field.type)[:2]
            options = get_args(kind)
            optional = type(None) in options
            (kind,) = (o for o in options if o is not type(None)) if optional else (kind,)
            text = texts.get(field.name, "")
            found.append(
                DeclaredParameter(field.name, kind, optional, field.default, declared, text)
            )
    return tuple(found)


PARAMETERS = _declared_parameters(SamplingParams)

# The checks of a request, by kind, so that each request only loops over them.
_LISTS = [f.name for f in msgspec.structs.fields(SamplingParams) if f.default == ()]
_SAMPLERS = [(p.name, p.default) for p in PARAMETERS if p.declared.sampler]
_FLAGS = [p.name for p in PARAMETERS if p.kind is bool]
_WORDS = {p.name: get_args(p.kind) for p in PARAMETERS if get_origin(p.kind) is Literal}
_NUMBERS = [
    (p.name, p.declared.low, p.declared.high, p.declared.above_low)
    for p in PARAMETERS
    if p.kind is float
]
_INTEGERS = [
    (p.name, p.declared.low, p.declared.high)
    for p in PARAMETERS
    if p.kind is int and not p.optional
]
_OPTIONAL_INTEGERS = [
    (p.name, p.declared.low, p.declared.high) for p in PARAMETERS if p.kind is int and p.optional
]
_INTEGER_LISTS = [
    (p.name, p.declared.entries, p.declared.low, p.declared.high)
    for p in PARAMETERS
    if p.declared.entries
]
