"""Serves your engine by a server of some 60 lines, then Quire's by its own.

    python -m lessons 13 [--mine FILE]

1. Your server streams, batches whoever comes, and forgets clients that leave.
2. The same requests to Quire's own server, whose engine is another process.
3. What yours does not do: bodies that are wrong, health, metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn

from lessons import mine
from lessons.common import Loaded, check, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.process.client import EngineClient
from quire.server.app import build_app
from quire.server.args import ServerArgs

PROMPTS = ("Once upon a time", "The little dog", "One day, a girl", "Tom and his friend")
LENGTH = 12
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kv_cache_gb": 0.2}
HEADERS = ("server", "clients", "steps", "events of the first")


async def post(
    port: int, body: dict[str, Any], *, leave_after: int | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Returns the status, and the events of a stream or the one object of another answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
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
    return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0.0}


def text_of(answers: list[tuple[int, list[dict[str, Any]]]]) -> list[str]:
    """Returns each stream's text."""
    return ["".join(event["choices"][0]["text"] for event in events) for _, events in answers]


def expected(loaded: Loaded) -> list[str]:
    """Returns the texts of the engine without a server."""
    llm = LLM(str(loaded.path), **SETTINGS)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs[0].text for output in outputs]


async def small(loaded: Loaded, texts: list[str]) -> list[Any]:
    """Serves the reader's engine from this process: four clients at once, then one that leaves."""
    own = own_model(loaded)
    core, steps = mine.Engine(own, mine.PrefixCache(own, count=128)), [0, 0]
    server = mine.Server(core, loaded.tokenizer.hub)
    step = core.step

    def counted() -> list[tuple[mine.Request, int]]:
        rows = step()
        steps[0], steps[1] = steps[0] + 1, steps[1] + sum(count for _, count in rows)
        return rows

    core.step = counted  # type: ignore[method-assign]
    driver = asyncio.create_task(server.drive())
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    answers = await asyncio.gather(*(post(port, body(p)) for p in PROMPTS))
    row, before = ["mine", len(answers), steps[0], len(answers[0][1])], list(steps)
    await post(port, {**body(PROMPTS[0]), "max_tokens": 200}, leave_after=3)
    while core.running:
        await asyncio.sleep(0.01)
    listener.close()
    driver.cancel()
    print(table(HEADERS, [row]))
    check(text_of(answers) == texts, "my server streams the texts of Quire's engine")
    check(before[0] < 2 * LENGTH, f"{before[0]} steps gave four clients {LENGTH} tokens each")
    after = steps[1] - before[1]
    check(after < 100, f"a client left after 3 of 200 tokens; {after} were computed\n")
    return row


@contextlib.asynccontextmanager
async def shipped(loaded: Loaded) -> AsyncIterator[int]:
    """Serves with the engine in a process of its own; gives the port."""
    settings = EngineArgs(model=str(loaded.path), **SETTINGS)
    client = await EngineClient.launch(settings)
    app = build_app(client, ServerArgs())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task
    await client.shutdown()


async def compare(loaded: Loaded) -> None:
    texts = expected(loaded)
    rows = [await small(loaded, texts)]
    async with shipped(loaded) as port:
        stream = {"model": loaded.path.name, "stream": True, "ignore_eos": True}
        answers = await asyncio.gather(*(post(port, {**body(p), **stream}) for p in PROMPTS))
        metrics = await get(port, "/metrics")
        steps = int(float(re.findall(r"^quire_engine_steps_total (\S+)", metrics, re.M)[0]))
        rows.append(["Quire", len(answers), steps, len(answers[0][1])])
        print(table(HEADERS, rows))
        check(text_of(answers) == texts, "Quire's server streams the same texts")
        status, errors = await post(port, {**body("x"), "max_tokenz": 1})
        check(status == 400, f"a field that is unknown: {errors[0]['error']['message']}")
        check(" 200 " in (await get(port, "/health")).split("\n")[0], "it says how it is")


def main(arguments: Sequence[str] | None = None) -> None:
    asyncio.run(compare(load(parser(__doc__ or "").parse_args(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
