"""The application over a scripted engine, on a socket, for clients that want a server."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import uvicorn

import quire
from quire.engine.loop.output import CompletionUpdate
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.http.websocket import WEBSOCKETS
from quire.server.process.listen import bind, url_of
from quire.text.tokenizer import Tokenizer
from tests.server.fakes import FakeClient, refuse_grammar

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"
MODEL = "scripted"


@dataclass
class Scripted:
    url: str
    engine: FakeClient

    def openai(self, **options: Any) -> openai.OpenAI:
        options.setdefault("api_key", "none")
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=30, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        options.setdefault("api_key", "none")
        return anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=30, **options)


TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call them as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Tools as Hermes and Qwen write them, and thinking that can be turned off."""


def scripted_engine(*words: str, **options: Any) -> FakeClient:
    """An engine with the embedded model's tokenizer and chat template."""
    engine = FakeClient(words=words, tokenizer=Tokenizer.from_path(EMBEDDED), **options)
    engine.config = SimpleNamespace(
        model_name=MODEL,
        model_path=str(EMBEDDED),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        hidden_size=64,
        embedding_size=64,
        task="generate",
        encoder=False,
        longest_prompt=2047,
        prompts={},
        default_prompt=None,
        matryoshka=(),
        pooling="last",
        images=False,
        scheduler=SimpleNamespace(max_model_len=2048),
        args=SimpleNamespace(lora_dir=None),
    )
    return engine


@dataclass
class Speaker(FakeClient):
    """Answers each request with the next scripted text, token by token. `heard` has the prompts as
    text, `aborted` the unfinished requests."""

    texts: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_path(EMBEDDED)
        self.tokenizer.use_template(TEMPLATE)
        self.config = scripted_engine().config

    def say(self, *texts: str) -> None:
        self.texts += texts

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[CompletionUpdate]:
        refuse_grammar(params)
        self.seen.append((prompt, params))
        self.heard.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        ids = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False).tolist()
        shown = ids[: params.max_tokens]
        self.aborted.append(request_id)
        for place, token in enumerate(shown):
            await asyncio.sleep(0)
            last = place == len(shown) - 1
            if last:
                self.aborted.remove(request_id)
            yield CompletionUpdate(
                0,
                self.tokenizer.token_text(token),
                [token],
                None if params.logprobs is None else [{token: Logprob(-1.0, 1, "")}],
                finish_reason=("stop" if shown == ids else "length") if last else None,
                prompt_token_ids=list(prompt) if place == 0 else None,
            )


@contextmanager
def serve(
    engine: FakeClient,
    args: ServerArgs | None = None,
    wrap: Callable[[Any], Any] | None = None,
    http: Any = "auto",
) -> Iterator[Scripted]:
    """Serves the engine. `wrap` puts middleware around the application; `http` is the class of
    connections."""
    args = args or ServerArgs(generation_config="none")
    sock = bind(dataclasses.replace(args, port=0))
    app = build_app(engine, args)  # type: ignore[arg-type]
    if wrap is not None:
        app = wrap(app)
    config = uvicorn.Config(
        app, http=http, lifespan="off", log_config=None, timeout_graceful_shutdown=1, **WEBSOCKETS
    )
    server = uvicorn.Server(config)
    sock.listen()  # clients may connect from now on; they wait until the server has started
    serving = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    serving.start()
    try:
        yield Scripted(url_of(sock, args), engine)
    finally:
        server.should_exit = True
        serving.join(30)
        assert not serving.is_alive()
