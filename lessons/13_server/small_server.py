"""A streaming HTTP server over the engine: POST /generate, answered by server-sent events."""

from __future__ import annotations

import asyncio
import json
import re

from quire.engine.loop.core import EngineCore
from quire.engine.loop.output import CompletionReader
from quire.sampling_params import SamplingParams
from quire.scheduler import RequestProgress
from quire.text.tokenizer import Tokenizer


class SmallServer:
    """One task drives the engine; each connection has a task that waits for its own tokens."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.queues: dict[str, asyncio.Queue[RequestProgress]] = {}
        self.engine, self.work = asyncio.Lock(), asyncio.Event()

    async def drive(self) -> None:
        """Turns the engine's loop, in a thread so that connections are served meanwhile."""
        while await self.work.wait():
            async with self.engine:  # one step, then whoever waits to add or abort
                steps = await asyncio.to_thread(self.core.step)
            for item in steps or ():
                if item.request.request_id in self.queues:
                    self.queues[item.request.request_id].put_nowait(item)
            if not self.core.has_work():
                self.work.clear()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = re.search(rb"length: (\d+)", (await reader.readuntil(b"\r\n\r\n")).lower())
        body = json.loads(await reader.readexactly(int(size[1]) if size else 0))
        name, prompt = str(id(writer)), self.tokenizer.encode(body.pop("prompt"))
        params = SamplingParams(**body)
        text = CompletionReader(0, prompt.tolist(), params, self.tokenizer)
        queue = self.queues[f"{name}/0"] = asyncio.Queue()
        async with self.engine:
            self.core.add(name, prompt, params, max_total=len(prompt) + (params.max_tokens or 16))
        self.work.set()
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        try:
            while not text.finished:
                item = await queue.get()
                reason = str(item.request.finish_reason) if item.finished else None
                update = text.feed(item.new_tokens.tolist(), (), reason, item.stop_token)
                writer.write(f"data: {json.dumps({'text': update.text})}\n\n".encode())
                await writer.drain()
        except ConnectionError:
            pass  # the client has gone
        finally:
            del self.queues[f"{name}/0"]
            async with self.engine:
                self.core.abort(name)
            writer.close()
