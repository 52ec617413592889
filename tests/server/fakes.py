"""A fake engine whose speed and failures a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from quire.engine.loop.embedding import Embedding
from quire.engine.loop.output import CompletionUpdate
from quire.errors import EngineDeadError, QuireError
from quire.features.call import CallType, NewsType
from quire.features.lora.calls import NAMES
from quire.features.structured_output.calls import CHECK_GRAMMAR
from quire.grammar.grammar import compilable
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.text.chat_template import TemplateTraits


def refuse_grammar(params: SamplingParams) -> None:
    """Raises GrammarError if the engine would refuse a request's grammar."""
    if params.structured_outputs is not None:
        compilable(params.structured_outputs)


@dataclass
class FakeClient:
    """Generates `words`, and waits for `gate` before each one except the first `free` ones. `error`
    is raised after the words instead of an end. Token ids are the words' numbers; with `encode`,
    words are tokenized."""

    words: tuple[str, ...] = ("one", " two", " three")
    free: int = 1_000_000
    error: QuireError | None = None
    encode: bool = False
    alive: bool = True
    end: str = ""
    silence: float = 0.0
    asleep: bool = False
    tokenizer: Any = None
    prompt_reader: Any = None
    adapters: tuple[str, ...] = ()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            model_name="fake",
            model_path="/nowhere",
            device="cpu",
            dtype="float32",
            kv_cache_dtype="float32",
            scheduler=SimpleNamespace(max_model_len=64),
            hidden_size=4,
            embedding_size=4,
            task="generate",
            encoder=False,
            longest_prompt=63,
            prompts={},
            default_prompt=None,
            matryoshka=None,
            images=False,
            pooling="last",
            args=SimpleNamespace(lora_dir=None),
        )
    )

    @property
    def replicas(self) -> list[Any]:
        return [self]

    @property
    def first_alive(self) -> Any:
        return self

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("dead")

    def news(self, news: NewsType[Any]) -> Any:
        return self.adapters if news is NAMES else news.default

    async def call(self, call: CallType[Any, Any], request: Any, on_end: Any = None) -> Any:
        if call is not CHECK_GRAMMAR:
            raise call.refuse()
        compilable(request)

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[CompletionUpdate]:
        if not self.alive:
            raise EngineDeadError("dead")
        refuse_grammar(params)
        self.seen.append((prompt, params))
        ended = False
        scored = None
        if params.prompt_logprobs is not None:
            scored = [None, *({token: Logprob(-2.0, 1, "p")} for token in (2, 3))]
        try:
            for i, word in enumerate(self.words):
                if i >= self.free:
                    await self.gate.wait()
                else:
                    await asyncio.sleep(0)
                ids = self.tokenizer.encode(word, False).tolist() if self.encode else [i]
                last = i == len(self.words) - 1 and self.error is None
                yield CompletionUpdate(
                    0,
                    word,
                    ids,
                    None if params.logprobs is None else [{j: Logprob(-1.0, 1, word)} for j in ids],
                    finish_reason="stop" if last else None,
                    prompt_token_ids=[1, 2, 3] if i == 0 else None,
                    prompt_logprobs=scored if i == 0 else None,
                )
            if self.error is not None:
                raise self.error
            ended = True
        finally:
            if not ended:
                self.aborted.append(request_id)

    async def sequences(
        self, search: Any, count: int, prompt: Any, params: SamplingParams, keep_special: Any
    ) -> Any:
        return search.best(count, prompt, params, None)

    async def vector(self, prompt: Any, **_: Any) -> Embedding:
        return Embedding(np.full(4, 0.5, dtype=np.float32), [1, 2, 3])

    async def stats(self) -> Any:
        raise EngineDeadError("no statistics")


class PlainTokenizer:
    """One token per character; the template is the messages' contents."""

    chat_templates: ClassVar[dict[str, str]] = {}
    config: ClassVar[dict[str, Any]] = {"tokenizer_class": "PlainTokenizer"}
    added_tokens: ClassVar[dict[str, int]] = {}
    hub: ClassVar[Any] = SimpleNamespace(token_to_id=lambda text: None)
    special_ids: ClassVar[frozenset[int]] = frozenset()

    def template(self, with_tools: bool = False) -> Any:
        return SimpleNamespace(variables=frozenset())

    def traits(self, template: Any) -> TemplateTraits:
        return TemplateTraits(shows_tools=False, shows_calls=False)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> Any:
        return np.array([min(ord(char), 2**31 - 1) for char in text], dtype=np.int32)

    def piece(self, id: int) -> str | None:
        return chr(id) if id < 0x110000 else None

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode("utf-8", "replace")
