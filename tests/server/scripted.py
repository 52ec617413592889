"""The application over a scripted engine, on a socket, for clients that want a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import uvicorn

import quire
from quire.engine.tokenizer import Tokenizer
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.run import bind, url_of
from tests.server.fakes import FakeClient

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"
MODEL = "scripted"


@dataclass
class Scripted:
    """`engine.words` is what it says next; `loop` is where its gate must be touched."""

    url: str
    engine: FakeClient
    loop: asyncio.AbstractEventLoop

    def openai(self, **options: Any) -> openai.OpenAI:
        options.setdefault("api_key", "none")
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=30, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        options.setdefault("api_key", "none")
        return anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=30, **options)

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.gate.set)


def scripted_engine(*words: str, **options: Any) -> FakeClient:
    """An engine with the embedded model's tokenizer and chat template."""
    engine = FakeClient(words=words, tokenizer=Tokenizer.from_path(EMBEDDED), **options)
    engine.config = SimpleNamespace(
        model_name=MODEL,
        model_path=str(EMBEDDED),
        scheduler=SimpleNamespace(max_model_len=2048),
    )
    return engine


@contextmanager
def serve(engine: FakeClient, args: ServerArgs | None = None) -> Iterator[Scripted]:
    sock = bind("127.0.0.1", 0)
    app = build_app(engine, args or ServerArgs(generation_config="none"))  # type: ignore[arg-type]
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    started: list[asyncio.AbstractEventLoop] = []
    ready = threading.Event()

    async def main() -> None:
        started.append(asyncio.get_running_loop())
        sock.listen()
        ready.set()
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Scripted(url_of(sock), engine, started[0])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
