"""Random engines, and random requests for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import torch

from quire import SamplingParams
from quire.engine.loop.embedding import NO_TOKENS
from quire.errors import RequestError
from quire.pooling_params import Pooling
from tests.combinations.models import (
    ADAPTED,
    ADAPTERS,
    EOS,
    FAMILIES,
    MTP,
    STATES,
    VOCAB,
    WINDOWS,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": json.dumps(SCHEMA)},
    {"json": json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 5})},
    {"json_object": True},
    {"regex": "[a-d]{3,9}"},
    {"regex": "(the|rest|in)( (the|rest|in)){0,5}"},
    {"choice": ["yes", "no", "not that I know of"]},
)


@dataclass(frozen=True)
class Setting:
    """Settings of one engine.

    Attributes:
        family: the model's family.
        dtype: the model's dtype.
        numbers: settings that change tokens, so the plain engine has them, too.
        others: settings that must not change tokens.
        stages: number of pipeline stages in this process.
        speculative: speculation method, or "".
        tenants: whether requests have tenants.
    """

    family: str
    dtype: str
    numbers: dict[str, Any]
    others: dict[str, Any]
    stages: int = 1
    speculative: str = ""
    tenants: bool = False

    @property
    def alone(self) -> bool:
        """Whether there is one worker."""
        parallel = "tensor_parallel_size", "pipeline_parallel_size"
        return self.stages == 1 and not any(name in self.others for name in parallel)

    @property
    def adapters(self) -> bool:
        return bool(self.others.get("enable_lora"))


@dataclass
class Asked:
    """A request. arrives: the step before which it arrives. leaves: steps until it is aborted,
    None: never; whose: the aborted completion, None: all. pooling: whether it asks for a vector."""

    prompt: list[int]
    params: SamplingParams
    adapter: str = ""
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    pooling: Pooling | None = None
    arrives: int = 0
    leaves: int | None = None
    whose: int | None = None


def draw_setting(draw: Random, ranks: int = 1) -> Setting:
    """ranks: number of processes, for tensor or pipeline parallelism."""
    family = draw.choice(tuple(FAMILIES))
    adapters = family in ADAPTED and draw.random() < 0.35
    deterministic = not adapters and draw.random() < 0.15
    numbers: dict[str, Any] = {}
    if draw.random() < 0.3:
        kinds = ["int8", "fp8", "w8a8", "w8a8_fp8", "int8,head=int8", "int4", "head=fp8"]
        numbers["quantization"] = draw.choice(kinds)
    if draw.random() < 0.35:
        numbers["kv_cache_dtype"] = draw.choice(["int8", "fp8", "fp8_dynamic"])
    if deterministic:
        numbers["deterministic"] = True
    size = draw.choice([2, 4, 4, 8, 8, 16, 32])
    lanes = draw.choice([1, 2, 3, 4, 6, 8, 8, 12])
    tight = draw.random() < 0.6
    blocks = -(-100 // size) + 1
    others: dict[str, Any] = {
        "block_size": size,
        "max_num_seqs": lanes,
        "max_num_batched_tokens": draw.choice([5, 8, 16, 33, 64, 128, 300]),
        "num_kv_blocks": blocks + draw.randint(0, blocks // 4) if tight else blocks * (lanes + 2),
        "enable_prefix_caching": draw.random() < 0.8,
    }
    stages = draw.choice([2, 2, 3]) if draw.random() < 0.12 and not adapters else 1
    others["steps_in_flight"] = (
        draw.choice([1, 1, 2, 2, 3, 4]) if stages == 1 else stages + draw.randint(0, 1)
    )
    if draw.random() < 0.08:
        others["enable_chunked_prefill"] = False
        others["max_num_batched_tokens"] = 300
    tiers = others["enable_prefix_caching"] and family not in WINDOWS and stages == 1
    if tiers and draw.random() < (0.6 if tight else 0.2):
        others["host_cache_gb"] = draw.choice([0.0003, 0.001, 0.01])
        if draw.random() < 0.3:
            others["disk_cache"] = "DISK"
    if draw.random() < 0.25:
        others["scheduling_policy"] = "priority"
    if ranks > 1:
        stages = 1
        name = draw.choice(["tensor_parallel_size", "pipeline_parallel_size"])
        others[name] = ranks
        if numbers.get("quantization", "").startswith("w8a8"):
            del numbers["quantization"]  # ranks round inputs by scales of their own
        others.pop("disk_cache", None)
        if name == "pipeline_parallel_size":
            others.pop("host_cache_gb", None)
            others["steps_in_flight"] = draw.randint(ranks, ranks + 1)
    if adapters:
        others["enable_lora"] = True
        others["max_loras"] = draw.choice([1, 1, 2, 3])
    method = draw_speculation(draw, family, others) if draw.random() < 0.5 else ""
    return Setting(
        family=family,
        dtype="float32" if deterministic else "float64",
        numbers=numbers,
        others=others,
        stages=stages,
        speculative=method,
        tenants=draw.random() < 0.2 and stages == 1,
    )


def draw_speculation(draw: Random, family: str, others: dict[str, Any]) -> str:
    ways = ["suffix"]
    if family in MTP:
        ways += ["mtp", "mtp"]
    elif family not in STATES:
        ways += ["draft", "auto", "draft"]
    if family in ("llama", "qwen3-moe", "qwen3-window"):
        ways.append("eagle3")
    method = draw.choice(ways)
    given: dict[str, Any] = {"num_speculative_tokens": draw.choice([1, 2, 3, 3, 5, 7])}
    if method != "auto":
        given["method"] = method
    given["lookup_min"] = draw.choice([1, 2])
    others["speculative"] = given
    return method


Probe = Callable[[Asked], tuple[list[int], str]]
"""Returns the tokens and the text of a request's first completion."""


class Requests:
    """Draws requests for one engine. Prompts share prefixes with others, or continue from their
    answers."""

    def __init__(self, draw: Random, setting: Setting, probe: Probe) -> None:
        self._draw = draw
        self._setting = setting
        self._probe = probe
        self._stems = [self._tokens(draw.randint(5, 60)) for _ in range(3)]
        self._texts: list[list[int]] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3, VOCAB) for _ in range(count)]

    def one(self) -> Asked:
        draw, setting = self._draw, self._setting
        params = self._params()
        asked = Asked(self._prompt(), SamplingParams(**params))
        if setting.adapters and draw.random() < 0.6:
            asked.adapter = draw.choice(ADAPTERS)
        if draw.random() < 0.1:
            asked.salt = "other"
        if setting.others.get("scheduling_policy") == "priority":
            asked.priority = draw.randint(-2, 2)
        if setting.tenants:
            asked.tenant = draw.choice(["a", "b", "c"])
        asked.arrives = int(draw.expovariate(1 / 6)) if draw.random() < 0.7 else 0
        if draw.random() < 0.08 and setting.stages == 1:
            asked.params, asked.pooling = NO_TOKENS, draw.choice(["mean", "last"])
            return asked
        if draw.random() < 0.35:
            self._decorate(params, *self._probe(asked))
        self._add(params)
        try:
            asked.params = SamplingParams(**params)
        except RequestError:
            return self.one()
        self._texts.append(asked.prompt + self._probe(asked)[0])
        if draw.random() < 0.12:
            asked.leaves = draw.randint(0, 25)
            if params.get("n", 1) > 1 and draw.random() < 0.5:
                asked.whose = draw.randrange(params["n"])
        return asked

    def _prompt(self) -> list[int]:
        draw = self._draw
        kind = draw.random()
        if kind < 0.3 or (kind < 0.7 and not self._texts):
            stem = draw.choice(self._stems)
            return (stem[: draw.randint(1, len(stem))] + self._tokens(draw.randint(0, 9)))[:60]
        if kind < 0.7:
            text = draw.choice(self._texts)
            cut = text if draw.random() < 0.6 else text[: draw.randint(1, len(text))]
            return (cut + self._tokens(draw.randint(0, 6)))[:60]
        if kind < 0.8:
            part = self._tokens(draw.randint(1, 6))
            return (part * 20)[: draw.randint(1, 60)]
        return self._tokens(draw.choice([1, 2, 3, 8, 17, 40, 60]))

    def _params(self) -> dict[str, Any]:
        """Returns parameters that do not depend on the text."""
        draw = self._draw
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw.randint(1, 36)}
        if draw.random() < 0.5:
            params["temperature"] = draw.choice([0.3, 0.7, 1.0, 1.5])
            params["seed"] = draw.randint(0, 5)
            if draw.random() < 0.4:
                params["top_k"] = draw.choice([1, 3, 20])
            if draw.random() < 0.4:
                params["top_p"] = draw.choice([0.3, 0.9])
            if draw.random() < 0.2:
                params["min_p"] = 0.05
        self._shape(params)
        return params

    def _shape(self, params: dict[str, Any]) -> None:
        """Adds random values of n, penalties, masks and rare samplers."""
        draw = self._draw
        if draw.random() < 0.25:
            params["n"] = draw.choice([2, 2, 3, 5])
        if draw.random() < 0.5:
            params["ignore_eos"] = True
        if draw.random() < 0.3:
            params["repetition_penalty"] = draw.choice([1.0, 1.2, 0.8])
            params["presence_penalty"] = draw.choice([0.0, 0.7, -0.3])
            params["frequency_penalty"] = draw.choice([0.0, 0.5, -0.2])
        few = draw.random()
        if few < 0.1:
            params["allowed_token_ids"] = draw.sample(range(2, VOCAB), draw.choice([1, 2, 4, 30]))
        elif few < 0.3:
            favoured = draw.sample(range(2, VOCAB), draw.choice([1, 2, 4]))
            params["logit_bias"] = {token: draw.choice([3.0, 30.0, -5.0]) for token in favoured}
        if draw.random() < 0.2:
            params.setdefault("logit_bias", {})[EOS] = draw.choice([2.0, 4.0, 6.0])
        if draw.random() < 0.22:
            params["structured_outputs"] = draw.choice(GRAMMARS)
            params["max_tokens"] = draw.randint(5, 40)
        if draw.random() < 0.06:
            params["typical_p"] = 0.8
        if draw.random() < 0.06:
            params["xtc_probability"] = 0.5
        if draw.random() < 0.08:
            params["dry_multiplier"] = 0.8
            params["dry_breaker_ids"] = (3, 7)
        if draw.random() < 0.05 and self._setting.alone:
            params["logits_processors"] = (push,)

    def _decorate(self, params: dict[str, Any], tokens: list[int], text: str) -> None:
        """Adds stop conditions and forbidden words, drawn from the text."""
        draw = self._draw
        if text and draw.random() < 0.5:
            start = draw.randrange(len(text))
            params["stop"] = [text[start : start + draw.randint(1, 5)], "never, ever"]
            params["include_stop_str_in_output"] = draw.random() < 0.4
        if tokens and draw.random() < 0.5:
            params["stop_token_ids"] = draw.sample(tokens, 1) + draw.sample(range(VOCAB), 2)
        if tokens and draw.random() < 0.3 and "logits_processors" not in params:
            start = draw.randrange(len(tokens))
            bad = [tokens[start : start + draw.randint(1, 3)] for _ in range(2)]
            params["bad_token_ids"] = bad

    def _add(self, params: dict[str, Any]) -> None:
        """Adds random parameters that do not depend on the text."""
        draw = self._draw
        if draw.random() < 0.2:
            params["min_tokens"] = draw.randint(1, params["max_tokens"])
        if draw.random() < 0.3:
            params["logprobs"] = draw.choice([0, 1, 5])
        if draw.random() < 0.15:
            params["prompt_logprobs"] = draw.choice([0, 2])
        if draw.random() < 0.05:
            params["speculative"] = "off"
        if draw.random() < 0.1:
            params["skip_special_tokens"] = False
        if draw.random() < 0.05 and "stop" not in params:
            params["detokenize"] = False


def draw_neutral(draw: Random, params: SamplingParams) -> SamplingParams:
    """Returns further parameters, which must not change the results."""
    never = (209, 210, 209, 210)
    more: dict[str, Any] = draw.choice(
        [
            {"logits_processors": (*params.logits_processors, unchanged)},
            {"allowed_token_ids": params.allowed_token_ids or tuple(range(VOCAB))},
            {"bad_token_ids": (*params.bad_token_ids, never)},
            {"logit_bias": {7: 0.0, **(params.logit_bias or {})}},
            {"dry_multiplier": 0.1, "dry_allowed_length": 99} if not params.dry_multiplier else {},
            {"stop": (*params.stop, "\x00")} if params.detokenize else {},
            {"top_k": VOCAB} if not params.top_k else {},
            {"typical_p": 1.0 - 1e-9, "xtc_threshold": 0.9},
            {"xtc_probability": 1.0, "xtc_threshold": 0.51} if not params.xtc_probability else {},
        ]
    )
    return msgspec.structs.replace(params, **more)


def unchanged(said: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def push(said: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A caller's function: pushes the tokens that follow the last one."""
    last = said[-1] if said else 5
    logits[(last + 1) % VOCAB] += 4.0
    logits[(3 * last + 7) % VOCAB] += 5.0
    return logits
