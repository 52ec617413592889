"""Playback: an engine with random weights writes given documents of one agent's tools.

Random weights write nothing that anyone would. So a hook, the oracle, raises the logit of the next
token of a lane's document. Everything else runs as in any engine: masks, drafts, sampling.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.config import EngineConfig
from quire.features import registry
from quire.features.loop_feature import LoopFeature
from quire.features.spec import FeatureSpec
from quire.features.structured_output.compiler import compiler_setup
from quire.runner.hooks import HeadContext, ProgramHook
from quire.runner.state import BatchState
from quire.sampling_params import StructuredOutputsParams

FEATURE = FeatureSpec(
    name="oracle",
    loop="structured_documents:OracleLoop",
    hook="structured_documents:open_oracle",
    enabled=lambda args: True,
)
_SURE = 1e4
"""The logit of a document's next token."""
_TEXT = (
    "the cache keeps blocks of a prefix until another request needs their memory so a test must "
    "fill it first then read the same text again and compare what was computed with what was found"
)
_WORDS = _TEXT.split()
_oracles: list[Oracle] = []


class OracleLoop(LoopFeature):
    """The oracle has no part in the loop."""

    def __init__(self, config: EngineConfig) -> None:
        pass


class Oracle(ProgramHook):
    """Raises the logits of the tokens of documents.

    Args:
        length: Most tokens of a request.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def bind(self, state: BatchState) -> None:
        shape = state.limits.lanes, self._length
        self._tokens = torch.full(shape, -1, dtype=torch.int64, device=state.device)

    def write(self, documents: Sequence[Sequence[int]], start: int) -> None:
        """Gives each lane a document, which begins at position `start` of its request."""
        self._tokens.fill_(-1)
        for lane, row in enumerate(self._tokens):
            document = torch.tensor(documents[lane % len(documents)][: self._length - start])
            row[start : start + len(document)] = document

    def logits(self, ctx: HeadContext) -> None:
        lanes, places = ctx.logit_rows.lanes.long(), ctx.logit_rows.lengths.long()
        tokens = self._tokens[lanes.clamp(min=0), places.clamp(0, self._length - 1)].unsqueeze(1)
        logits, wanted = ctx.own_logits(), tokens.clamp(min=0)
        sure = torch.full_like(tokens, 1, dtype=logits.dtype) * _SURE
        known = (tokens >= 0) & (lanes >= 0).unsqueeze(1)
        logits.scatter_(1, wanted, torch.where(known, sure, logits.gather(1, wanted)))


def open_oracle(config: EngineConfig) -> Oracle:
    _oracles.append(Oracle(config.scheduler.max_model_len))
    return _oracles[-1]


def install() -> None:
    """Makes engines to come have an oracle. Call it before the first engine is made."""
    registry._installed().add("structured_documents:FEATURE", lambda: FEATURE)


def oracle() -> Oracle:
    """Returns the oracle of the newest engine in this process."""
    return _oracles[-1]


class Documents(NamedTuple):
    """Documents as tokens that their schema's masks allow.

    Attributes:
        tokens: The tokens of each document.
        forced: Share of the tokens that the schema forces.
    """

    tokens: list[list[int]]
    forced: float


def written(config: EngineConfig, schema: str, count: int, length: int) -> Documents:
    """Returns documents of so many tokens, of the tools of `structured_loads.agent_tools`."""
    compiler = compiler_setup(config).open()
    grammar = compiler.compile(StructuredOutputsParams(json=schema)).result()
    found, forced = [], 0
    for number in range(count):
        document = list(_tokens(grammar.deep_copy(), compiler, _document(number), length))
        found.append([token for token, _ in document])
        forced += sum(alone for _, alone in document)
    compiler.shutdown()
    return Documents(found, forced / (count * length))


def _tokens(matcher: Any, compiler: Any, text: bytes, length: int) -> Iterator[tuple[int, bool]]:
    """Yields the tokens of a text, always the longest that a mask allows, and whether the mask
    allows no other."""
    tokenizer, at = compiler.tokenizer, 0
    for _ in range(length):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        token = _longest(tokenizer, mask, text[at : at + 64])
        at += len(tokenizer.decode_bytes([token]))
        matcher.consume_token(token)
        yield token, int(np.unpackbits(mask).sum()) == 1


def _longest(tokenizer: Any, mask: Any, text: bytes) -> int:
    for token in [tokenizer.tokenize_bytes(text)[0], *_prefixes(tokenizer, text)]:
        if mask[token >> 3] >> (token & 7) & 1:
            return int(token)
    raise SystemExit(f"the schema does not allow {text!r}")


def _prefixes(tokenizer: Any, text: bytes) -> Iterator[int]:
    for end in range(min(len(text), 24), 0, -1):
        tokens = tokenizer.tokenize_bytes(text[:end])
        if len(tokens) == 1:
            yield tokens[0]


def _document(number: int) -> bytes:
    """Returns calls of tools, as a model writes them."""
    chance = random.Random(number)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(least, most)))

    def path() -> str:
        return f"src/{chance.choice(_WORDS)}/{chance.choice(_WORDS)}_{chance.choice(_WORDS)}.py"

    makers = {
        "read_file": lambda: {
            "path": path(), "first_line": chance.randint(1, 400), "last_line": 460,
        },
        "write_file": lambda: {"path": path(), "content": words(10, 40)},
        "replace": lambda: {
            "path": path(), "old": words(3, 12), "new": words(3, 12), "all": chance.random() < 0.5,
        },
        "search": lambda: {
            "pattern": words(1, 3), "folder": "src", "kind": "text", "most": chance.randint(1, 90),
        },
        "run": lambda: {"command": f"make {words(1, 2)}", "timeout_s": 60, "background": False},
        "fetch": lambda: {"url": f"https://example.com/{chance.choice(_WORDS)}", "method": "GET"},
        "ask": lambda: {"question": words(5, 20)},
    }  # fmt: skip
    calls = []
    for _ in range(200):
        name = chance.choice(list(makers))
        calls.append({"name": name, "arguments": makers[name]()})
    return json.dumps(calls).encode()
