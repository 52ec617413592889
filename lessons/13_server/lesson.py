"""Serves the engine: by a server of some 60 lines, then by the shipped one.

    python -m lessons.13_server.lesson

1. `small_server.py`: streams, batches whoever comes, and forgets clients that leave.
2. The same requests to Quire's own server, whose engine is another process.
3. What the small one lacks: bodies that are wrong, health, metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn

from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.process.client import EngineClient
from quire.server.app import build_app
from quire.server.args import ServerArgs

PROMPTS = ("Once upon a time", "The little dog", "One day, a girl", "Tom and his friend")
LENGTH = 12
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kv_cache_gb": 0.2}
SmallServer = importlib.import_module("lessons.13_server.small_server").SmallServer


async def post(
    port: int, path: str, body: dict[str, Any], *, leave_after: int | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Returns the status, and the events of a stream or the one object of another answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    events: list[dict[str, Any]] = []
    async for line in reader:
        text = line.decode().removeprefix("data: ").strip()
        if text.startswith("{"):
            events.append(json.loads(text))
        if len(events) == leave_after:
            break
    writer.close()
    return status, events


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}


def expected(loaded: Loaded) -> list[str]:
    """Returns the texts of the engine without a server."""
    llm = LLM(str(loaded.path), **SETTINGS)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs[0].text for output in outputs]


async def small(loaded: Loaded, texts: list[str]) -> list[list[Any]]:
    """Serves from this process: four clients at once, then one that leaves."""
    config = resolve(EngineArgs(model=str(loaded.path), **SETTINGS))
    core = build_core(config)
    server = SmallServer(core, loaded.tokenizer)
    driver = asyncio.create_task(server.drive())
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    answers = await asyncio.gather(*(post(port, "/generate", body(p)) for p in PROMPTS))
    found = ["".join(event["text"] for event in events) for _, events in answers]
    steps, tokens = core.stats().steps, LENGTH * len(PROMPTS)
    check(found == texts, "the small server streams the engine's texts")
    check(steps < tokens / 2, f"{tokens} tokens of {len(PROMPTS)} clients took {steps} steps")
    await post(port, "/generate", {**body(PROMPTS[0]), "max_tokens": 200}, leave_after=3)
    while core.has_work():
        await asyncio.sleep(0.01)
    taken = core.stats().generation_tokens - tokens
    check(taken < 100, f"a client left after 3 of 200 tokens; {taken} were computed")
    listener.close()
    driver.cancel()
    core.shutdown()
    return [["the small one", len(answers), steps, len(answers[0][1])]]


@contextlib.asynccontextmanager
async def shipped(loaded: Loaded) -> AsyncIterator[int]:
    """Serves with the engine in a process of its own; gives the port."""
    settings = EngineArgs(model=str(loaded.path), **SETTINGS)
    client = await EngineClient.launch(settings)
    config = uvicorn.Config(
        build_app(client, ServerArgs()), port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task
    await client.shutdown()


async def compare(loaded: Loaded) -> None:
    texts = expected(loaded)
    rows = await small(loaded, texts)
    async with shipped(loaded) as port:
        stream = {"model": loaded.path.name, "stream": True}
        answers = await asyncio.gather(
            *(post(port, "/v1/completions", {**body(p), **stream}) for p in PROMPTS)
        )
        found = ["".join(e["choices"][0]["text"] for e in events) for _, events in answers]
        check(found == texts, "the shipped server streams the same texts")
        metrics = await get(port, "/metrics")
        steps = int(float(re.findall(r"^quire_engine_steps_total (\S+)", metrics, re.M)[0]))
        rows.append(["the shipped one", len(answers), steps, len(answers[0][1])])
        status, errors = await post(port, "/v1/completions", {**body("x"), "max_tokenz": 1})
        check(status == 400, f"a field that is unknown: {errors[0]['error']['message']}")
        check(" 200 " in (await get(port, "/health")).split("\n")[0], "it says how it is")
    print(table(["server", "clients", "steps", "events of the first"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    asyncio.run(compare(load(parser(__doc__ or "").parse_args(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
