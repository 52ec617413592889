"""Two real servers: the reader lets the writer compute its prompts.

The tests cover answers and metrics, readers that do not match, and requests while a server dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.router.fleet import Fleet, FleetSettings
from quire.router.prompts import read_prompt
from quire.router.server import build_router
from tests.router.fake_replica import serving
from tests.server.chaos import Plan, run_chaos
from tests.server.server_process import MODEL, WAIT, Server, start_server
from tests.server.test_faults import child
from tests.server.test_otel import PARENT, TRACE, Collector, attributes

STORY = "One day, a little fox went into the woods to look for berries and to see the owl. " * 5
KEY = "secret"
LEASE = ("--lease-timeout", "5")


def start_reader(writer: Server, *flags: str) -> Server:
    asks = ("--role", "decode", "--peer", writer.url, "--peer-key", KEY)
    return start_server(*asks, "--remote-prefill-tokens", "32", *LEASE, *flags)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Receives the writer's spans."""
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def servers(collector: Collector) -> Iterator[tuple[Server, Server]]:
    """A writer, which requires a key and computes prompts in several steps, and a reader."""
    steps = ("--max-num-batched-tokens", "64", "--kv-transfer", "async")
    writer = start_server(
        *("--role", "prefill", "--api-key", KEY, "--otlp-endpoint", collector.url, *steps, *LEASE),
        variables={"OTEL_BSP_SCHEDULE_DELAY": "50"},
    )
    reader = start_reader(writer)
    yield writer, reader
    for server in (reader, writer):
        server.stop(signal.SIGKILL)


def ask(server: Server, prompt: str, key: str = "none", **options: Any) -> str:
    client = server.client(api_key=key)
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, **options)
    return str(made.choices[0].text)


def metric(server: Server, name: str) -> float:
    asked = urllib.request.Request(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        lines = response.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(name + " "))
    return float(line.rpartition(" ")[2])


def fetches(server: Server, outcome: str = "done") -> float:
    return metric(server, f'quire_kv_fetches_total{{outcome="{outcome}"}}')


def post(
    server: Server, path: str, body: object, key: str = KEY, method: str = "POST"
) -> tuple[int, Any]:
    asked = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


FACTS = {
    "protocol": 1,
    "version": "0",
    "transport": "tcp",
    "model": "another",
    "dtype": "bfloat16",
    "kv_cache_dtype": "int8",
    "block_size": 32,
    "groups": [],
}


def test_prompts_come_from_the_peer(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        prompt = f"{options} {STORY}"
        before = fetches(reader)
        assert ask(reader, prompt, **options) == ask(writer, prompt, KEY, **options)
        assert fetches(reader) == before + 1
    assert metric(reader, "quire_remote_hit_tokens_total") > 0
    assert metric(reader, "quire_kv_fetches_local_total") == 0
    sent = metric(writer, "quire_kv_blocks_sent_total")
    assert sent == metric(reader, "quire_kv_blocks_received_total") > 0
    reader.wait_for(lambda: metric(writer, "quire_kv_grants_open") == 0, "the grants' end")
    # Short prompts, and those that are in the cache, are computed here.
    assert ask(reader, "Once upon a time")
    ask(reader, prompt)
    assert fetches(reader) == before + 1


def test_a_trace_spans_the_handover(servers: tuple[Server, Server], collector: Collector) -> None:
    _, reader = servers
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert ask(reader, f"traced {STORY}", extra_headers=headers)

    def spans() -> list[Any]:
        found = collector.named("POST /kv/prefill")
        return [span for span in found if span.trace_id.hex() == TRACE]

    reader.wait_for(lambda: bool(spans()), "the span of the grant")
    (request,) = spans()
    assert request.parent_span_id.hex() == PARENT
    assert attributes(request)["quire.handover.outcome"] == "done"
    parts = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert [span.name for span in parts] == ["prefill", "handover"]
    prefill, handover = parts
    times = [request.start_time_unix_nano, prefill.start_time_unix_nano]
    times += [prefill.end_time_unix_nano, handover.end_time_unix_nano]
    assert times == sorted(times)
    assert prefill.end_time_unix_nano == handover.start_time_unix_nano
    assert handover.end_time_unix_nano <= request.end_time_unix_nano


def test_a_trace_tells_of_a_refusal(servers: tuple[Server, Server], collector: Collector) -> None:
    writer, reader = servers
    asked = {"tokens": [1] * 16, "first": 0, "reader": "r", "epoch": "another"}
    assert post(writer, "/kv/prefill", asked)[0] == 409

    def statuses() -> list[int]:
        found = collector.named("POST /kv/prefill")
        return [attributes(span)["http.response.status_code"] for span in found]

    reader.wait_for(lambda: 409 in statuses(), "the span of a refusal")


def test_a_mismatch_error_names_both_sides_values(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    status, answer = post(writer, "/kv/handshake", FACTS)
    assert (status, answer["error"]["code"]) == (409, "peer_mismatch")
    assert "block_size: 16 here, 32 at the peer" in answer["error"]["message"]
    assert "kv_cache_dtype: 'float32' here, 'int8' at the peer" in answer["error"]["message"]
    asked = {"tokens": [1] * 16, "first": 0, "reader": "r", "epoch": "another"}
    status, answer = post(writer, "/kv/prefill", asked)
    assert (status, answer["error"]["code"]) == (409, "peer_mismatch")
    assert post(writer, "/kv/prefill", asked, key="wrong")[0] == 401
    for path, body in (("/kv/handshake", FACTS), ("/kv/prefill", asked)):
        status, answer = post(reader, path, body)
        assert (status, answer["error"]["code"]) == (400, "wrong_role")
    assert "a reader does not match" in "".join(writer.output)


def test_a_router_has_prompts_computed_where_that_costs_least(
    servers: tuple[Server, Server],
) -> None:
    writer, reader = servers

    async def main() -> None:
        fleet = Fleet(FleetSettings(key=KEY, check_seconds=0.1))
        fleet.join(writer.url, "prefill")
        decoding = fleet.join(reader.url, "decode")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(fleet.close)
            url = await stack.enter_async_context(serving(build_router(fleet, None, 1 << 20)))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            await until(lambda: all(r.available and r.state.informed for r in fleet))
            await until(lambda: bool(decoding.state.peers))

            async def ask_router(prompt: str) -> str:
                made = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=12, temperature=0.0
                )
                return str(made.choices[0].text)

            # Nothing decodes, so a long prompt delays nobody.
            before, prompt = fetches(reader), "an idle reader " + STORY
            assert await ask_router(prompt) == ask(writer, prompt, KEY, temperature=0.0)
            assert fetches(reader) == before
            # The server has cached it now, and its events report this.
            held = read_prompt(json.dumps({"model": MODEL, "prompt": prompt}).encode())
            known = fleet.chooser.prefixes.look_up(held)
            assert len(known.blocks) > 0
            await until(lambda: decoding.state.held_tokens(known) > 0)
            # Many decode: the reader computes prompts faster than the writer does in its small
            # steps, and on a busy machine so much so that making one wait costs less than asking.
            stream = await client.completions.create(
                model=MODEL, prompt="On and on", max_tokens=2000, n=16, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            await until(lambda: decoding.state.load.running == 16)
            # The router compares measured rates, which other programs disturb.
            for attempt in range(6):
                prompt = f"a busy reader {attempt} " + STORY * 3
                assert await ask_router(prompt) == ask(writer, prompt, KEY, temperature=0.0)
                if fetches(reader) > before:
                    break
            assert fetches(reader) == before + 1
            await stream.close()

    asyncio.run(main())
    # An unknown peer's name is refused, even by a server without peers.
    for server, key in ((reader, "none"), (writer, KEY)):
        with pytest.raises(openai.BadRequestError, match=r"no peer|asks no other server"):
            ask(server, STORY, key, extra_headers={"x-quire-prefill": "http://127.0.0.1:1"})
    assert post(writer, "/kv/peers", {"peers": []}, method="PUT")[0] == 400
    assert post(reader, "/kv/peers", {"peers": ["ftp://x"]}, method="PUT")[0] == 400
    assert post(reader, "/kv/peers", {"peers": [writer.url]}, method="PUT")[0] == 200


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_reader_that_does_not_match_computes_its_prompts(
    servers: tuple[Server, Server],
) -> None:
    writer, _ = servers
    other = start_reader(writer, "--block-size", "32")
    try:
        assert ask(other, STORY, temperature=0.0) == ask(writer, STORY, KEY, temperature=0.0)
        assert fetches(other, "refused") == 1
        assert metric(other, "quire_kv_fetches_local_total") == 1
        assert metric(other, "quire_peers_up") == 0
        assert "block_size: 16 here, 32 at the peer" in "".join(other.output)
    finally:
        other.stop(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (4, 2)])
def test_servers_of_several_ranks(servers: tuple[Server, Server], ranks: tuple[int, int]) -> None:
    """Tokens equal those of a server with one rank."""
    alone, _ = servers
    count = "--tensor-parallel-size"
    writer = start_server("--role", "prefill", "--api-key", KEY, count, str(ranks[0]))
    reader = start_reader(writer, count, str(ranks[1]))
    try:
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
            prompt = f"{ranks} {options} {STORY}"
            assert ask(reader, prompt, **options) == ask(alone, prompt, KEY, **options)
        assert fetches(reader) == 2
        assert metric(reader, "quire_kv_fetches_local_total") == 0
    finally:
        for server in (reader, writer):
            server.stop(signal.SIGKILL)


def test_a_writer_that_dies_and_comes_back(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    os.kill(child(writer, "quire.engine.process.process"), signal.SIGKILL)
    assert ask(reader, "while it is dead " + STORY)
    assert metric(reader, "quire_kv_fetches_local_total") >= 1
    writer.wait_for(lambda: metric(writer, "quire_engine_up") == 1, "the engine to be back")
    reader.wait_for(lambda: metric(reader, "quire_peers_up") == 1, "the peer to be asked again")
    before = fetches(reader)
    prompt = "when it is back " + STORY
    assert ask(reader, prompt, temperature=0.0) == ask(writer, prompt, KEY, temperature=0.0)
    assert fetches(reader) == before + 1


def test_a_reader_that_dies_leaves_nothing(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    pid = child(reader, "quire.engine.process.process")
    client = reader.client()
    streams = [
        client.completions.create(
            model=MODEL, prompt=f"{i} {STORY * 3}", max_tokens=200, stream=True
        )
        for i in range(3)
    ]
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        stream.close()
    for name in ("quire_kv_grants_open", "quire_requests_running"):
        writer.wait_for(lambda name=name: metric(writer, name) == 0, f"{name} to be 0")  # type: ignore[misc]
    assert metric(writer, 'quire_kv_blocks{group="0",state="used"}') == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["full", "window", "state"])
def test_chaos(tmp_path: Path, model: str) -> None:
    """Servers are killed and clients leave at random. No answer is wrong, and no resources stay in
    use."""
    chaos = run_chaos(Plan(150, model=model, jobs=40, each=10, round=75), tmp_path)
    assert chaos.good, chaos.result()
    assert chaos.ends["equal"] > 75
