"""A real engine process behind the async client: streams, ends, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.loop.calls import STATS
from quire.engine.loop.messages import (
    AddRequest,
    CallAnswer,
    CompletionEnd,
    CompletionStart,
    Failure,
    StepOutputs,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from quire.engine.loop.output import CompletionReader
from quire.engine.loop.stats import EngineStats
from quire.engine.process.client import CompletionUpdate, EngineClient
from quire.engine.process.streams import RequestStream
from quire.errors import (
    BrokenLogitsError,
    ConfigError,
    EngineDeadError,
    ModelError,
    PromptTooLongError,
    RequestError,
    RequestTooLargeError,
)
from quire.features.call import CallType, decode_body, encode_body
from quire.features.lora.calls import load_adapter, unload_adapter
from quire.plan import Logprobs
from quire.sampling_params import SamplingParams

Work = Callable[[EngineClient], Awaitable[None]]


def on_engine(work: Work, **settings: object) -> None:
    async def go() -> None:
        args = EngineArgs(**{"kv_cache_gb": 0.1, "device": "cpu", **settings})  # type: ignore[arg-type]
        client = await EngineClient.launch(args)
        try:
            await work(client)
        finally:
            await client.shutdown()
            await client.shutdown()

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(asyncio.wait_for(go(), 120))


def endless(client: EngineClient, name: str) -> AsyncIterator[CompletionUpdate]:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    return client.generate([10, 20, 30], params, request_id=name)


async def tokens_of(updates: AsyncIterator[CompletionUpdate]) -> tuple[list[int], str | None]:
    found: list[int] = []
    reason = None
    async for update in updates:
        found += update.token_ids
        reason = update.finish_reason
    return found, reason


async def until_idle(client: EngineClient) -> None:
    for _ in range(3000):
        stats = await client.stats()
        if stats.running == stats.waiting == 0 and stats.blocks_used == [0]:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"still busy: {await client.stats()}")


def test_streams() -> None:
    async def work(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
        many = [client.generate([10 + i, 7], params, request_id=str(i)) for i in range(64)]
        together = await asyncio.gather(*(tokens_of(updates) for updates in many))
        assert all(len(tokens) == 20 and reason == "length" for tokens, reason in together)
        alone = await tokens_of(client.generate([10 + 5, 7], params, request_id="x"))
        assert alone == together[5]

        # Stop strings, several completions, log-probabilities, the prompt's too.
        options = SamplingParams(
            max_tokens=40, n=2, temperature=0.0, stop=("e",), logprobs=2, prompt_logprobs=1
        )
        updates = [u async for u in client.generate("Once upon a", options, request_id="y")]
        assert updates[0].prompt_token_ids == client.tokenizer.encode("Once upon a").tolist()  # type: ignore[union-attr]
        assert updates[0].queued > 0
        assert len(updates[0].prompt_logprobs or ()) == len(updates[0].prompt_token_ids or ())
        for index in (0, 1):
            own = [u for u in updates if u.index == index]
            text = "".join(u.text for u in own)
            assert "e" not in text
            assert (own[-1].finish_reason, own[-1].stop_reason) == ("stop", "e")
            assert sum(len(u.logprobs or ()) for u in own) == sum(len(u.token_ids) for u in own)
        await until_idle(client)

        # Leaving early, and aborting by name, end the work.
        left = endless(client, "left")
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]
        aborted = endless(client, "aborted")
        await anext(aborted)
        await client.abort("aborted")
        assert (await tokens_of(aborted))[1] == "abort"
        await client.abort("unknown")
        await until_idle(client)

        for prompt, error in (([], "empty"), ([10**6], "vocabulary"), ("", "empty")):
            with pytest.raises(RequestError, match=error):
                await anext(client.generate(prompt, params, request_id="bad"))  # type: ignore[arg-type]
        with pytest.raises(PromptTooLongError, match=r"5000.*2048"):
            await anext(client.generate([1] * 5000, params, request_id="long"))

    on_engine(work)


def test_broken_logits_end_a_stream_with_an_error_after_its_text() -> None:
    async def go() -> CompletionUpdate:
        stream, params = RequestStream(), SamplingParams(max_tokens=9)
        client = EngineClient(SimpleNamespace())  # type: ignore[arg-type]
        client.tokenizer = None
        delta = stream.delta(0)
        delta.tokens, delta.reason = [5, 6], "error"
        readers = [CompletionReader(0, [1], params, None)]
        source = (SimpleNamespace(), 0, stream)
        updates = client._updates(source, [1], readers, params)  # type: ignore[arg-type]
        first = await anext(updates)
        with pytest.raises(BrokenLogitsError):
            await anext(updates)
        return first

    update = asyncio.run(go())
    assert (update.token_ids, update.finish_reason) == ([5, 6], None)


def test_the_engine_refuses_a_request_that_can_never_fit() -> None:
    async def work(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=1000)
        with pytest.raises(RequestError, match="KV cache blocks") as caught:
            await anext(client.generate([1] * 100, params, request_id="a"))
        assert caught.value.param == "max_tokens"
        short = client.generate([1] * 100, SamplingParams(max_tokens=4), request_id="b")
        assert (await tokens_of(short))[1] in ("length", "stop")

    on_engine(work, num_kv_blocks=20)


def test_a_killed_engine_is_noticed_at_once() -> None:
    async def work(client: EngineClient) -> None:
        updates = endless(client, "a")
        await anext(updates)
        asking = asyncio.ensure_future(client.stats())
        os.kill(client.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDeadError):
            await tokens_of(updates)
        assert not client.alive
        assert time.monotonic() - start < 10
        await asyncio.wait([asking])
        with pytest.raises(EngineDeadError):
            await anext(endless(client, "b"))
        with pytest.raises(EngineDeadError):
            await client.stats()

    on_engine(work)


_CLIENT = """
import asyncio, os, signal
from quire.config import EngineArgs
from quire.engine.process import client, host

RANKS = 1

def die(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    args = EngineArgs(kv_cache_gb=0.1, device="cpu", tensor_parallel_size=RANKS)
    engine = await client.EngineClient.launch(args)
    die(engine.pid)
"""
_DIES_LATE = "asyncio.run(main())"
_DIES_EARLY = """
popen = host.subprocess.Popen
host.subprocess.Popen = lambda *a, **k: die(popen(*a, stdout=2, **k).pid)
asyncio.run(main())
"""
_DIES_BESIDE_A_FROZEN_ONE = """
end = die
def die(pid):
    os.kill(pid, signal.SIGSTOP)
    end(pid)
asyncio.run(main())
"""
_DIES_BESIDE_A_FROZEN_RANK = """
end = die
def die(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        rank = int(file.read())
    os.kill(rank, signal.SIGSTOP)
    end(rank)
RANKS = 2
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "moment",
    [_DIES_LATE, _DIES_EARLY, _DIES_BESIDE_A_FROZEN_ONE, _DIES_BESIDE_A_FROZEN_RANK],
    ids=["ready", "starting", "frozen", "frozen rank"],
)
def test_the_engine_ends_with_its_client(tmp_path: Path, moment: str) -> None:
    script = tmp_path / "client.py"
    script.write_text(_CLIENT + moment)
    client = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, timeout=120)
    engine = int(client.stdout)
    deadline = time.monotonic() + 20
    while _runs(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    outlived = _runs(engine)
    if outlived:
        os.kill(engine, signal.SIGKILL)
    assert not outlived


def test_ctrl_c_is_for_the_client() -> None:
    async def work(client: EngineClient) -> None:
        assert os.getpgid(client.pid) != os.getpgid(0)
        os.kill(client.pid, signal.SIGINT)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        tokens, _ = await tokens_of(client.generate([5, 6], params, request_id="a"))
        assert len(tokens) == 3

    on_engine(work)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"model": "/no/such/folder"}, ModelError, "no such model folder"),
        ({"max_model_len": 10**6}, ConfigError, "positions"),
        ({"kv_cache_gb": 1e-6}, ConfigError, "room for"),
    ],
)
def test_errors_of_the_start_are_the_engines_own(
    settings: dict[str, object], error: type[Exception], what: str
) -> None:
    async def never(client: EngineClient) -> None:
        pytest.fail("it started")

    with pytest.raises(error, match=what):
        on_engine(never, **settings)


def test_adapters_of_several_engines() -> None:
    """A load ends with the first refusal. An unload goes to all engines and succeeds if one of them
    knew the name."""
    refusal = RequestError("no")
    asked: list[CallType[Any, Any]] = []

    def engine(alive: bool, error: RequestError | None) -> SimpleNamespace:
        async def call(call: CallType[Any, Any], request: Any) -> None:
            assert alive
            asked.append(call)
            if error is not None:
                raise error

        return SimpleNamespace(alive=alive, call=call)

    def change(answers: list[RequestError | None], path: str | None) -> int:
        engines = [engine(False, None), *(engine(True, answer) for answer in answers)]
        found: Any = SimpleNamespace(engines=engines, check_alive=lambda: None)
        client = EngineClient(found)
        asked.clear()
        change = unload_adapter(client, "x") if path is None else load_adapter(client, "x", path)
        asyncio.run(change)
        return len(asked)

    assert change([None, None], "a") == change([None, None], None) == 2
    assert change([None, refusal], None) == change([refusal, None], None) == 2
    for answers, path, count in [([refusal, None], "a", 1), ([refusal, refusal], None, 2)]:
        with pytest.raises(RequestError, match="no"):
            change(answers, path)
        assert len(asked) == count


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(stop=("a", "b"), logit_bias={5: 1.5}, seed=-1)
    message = decode_to_engine(encode(AddRequest(3, int32([1, 2]), params, 10)))
    assert isinstance(message, AddRequest)
    assert message.params == params
    assert message.prompt.tolist() == [1, 2]
    scores = np.asarray([[-0.5, -0.25]], dtype=np.float32)
    logprobs = Logprobs(int32([0]), int32([7]), int32([[3, 4]]), scores, int32([2]))
    outputs = StepOutputs(
        int32([3, 9]),
        int32([1, 2]),
        int32([5, 6, 7]),
        starts=[CompletionStart(3, 4, 0.5)],
        ends=[CompletionEnd(9, "stop", 7)],
        logprobs=[(3, logprobs)],
    )
    back = decode_from_engine(encode(outputs))
    assert isinstance(back, StepOutputs)
    assert [x.tolist() for x in (back.handles, back.counts, back.tokens)] == [
        [3, 9],
        [1, 2],
        [5, 6, 7],
    ]
    assert (back.starts, back.ends) == (outputs.starts, outputs.ends)
    ((handle, part),) = back.logprobs
    assert (handle, part.ids.tolist(), part.ranks.tolist()) == (3, [[3, 4]], [2])
    assert part.values.tolist() == [[-0.5, -0.25]]
    stats = EngineStats(running=2, blocks_used=[3])
    answer = decode_from_engine(encode(CallAnswer(1, encode_body(stats))))
    assert isinstance(answer, CallAnswer)
    assert decode_body(answer.body, STATS.answer) == stats
    for original in (
        ConfigError("c", "dtype"),
        RequestError("r", "stop", "x"),
        RequestTooLargeError(5, 4),
        ModelError("m"),
    ):
        error = Failure.of(original).error()
        assert isinstance(original, type(error))
        assert str(error) == str(original)
        assert getattr(error, "param", None) == getattr(original, "param", None)
    assert "secret" not in Failure.of(ValueError("/secret/path")).message
