"""The engine's process answers every call, also where a feature fails at what the call holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.arrays import int32
from quire.engine.loop.messages import (
    AddRequest,
    CallFailed,
    ChangeAdapters,
    GetEvents,
    GetSnapshot,
    GetStats,
    GrantPrompt,
    RequestRefused,
    ResetPrefixCache,
    SetPeers,
    ShakeHands,
    ToEngine,
    decode_from_engine,
    encode,
)
from quire.engine.process.completions import CompletionTable
from quire.engine.process.process import EngineProcess
from quire.errors import EngineDeadError
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import PromptRequest
from quire.sampling_params import SamplingParams

FACTS = KVFacts(0, "", "", "", "", "", 0, [])
CALLS: list[ToEngine] = [
    AddRequest(7, int32([1]), SamplingParams(), 2),
    AddRequest(7, int32([1]), SamplingParams(), 2, prefill="http://a"),
    ChangeAdapters(7, "name", "path"),
    ChangeAdapters(7, "name"),
    ShakeHands(7, FACTS),
    GrantPrompt(7, PromptRequest([1], 0, "", "", "")),
    SetPeers(7, ["http://a"]),
    GetStats(7),
    GetSnapshot(7, True),
    GetEvents(7, "", 0),
    ResetPrefixCache(7),
]


class BrokenCore:
    """An engine each of whose features fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.aborted: list[str] = []
        self.config = SimpleNamespace(scheduler=None)

    def __getattr__(self, name: str) -> Any:
        raise self._error

    def abort(self, name: str, index: int | None = None) -> list[Any]:
        self.aborted.append(name)
        return []


def engine_with(core: BrokenCore) -> tuple[EngineProcess, list[Any]]:
    """Returns a process around a core, and the messages that it sends."""
    sent: list[Any] = []
    server: Any = SimpleNamespace(send=lambda _, data: sent.append(decode_from_engine(data)))
    process = EngineProcess(server)
    process._core = core  # type: ignore[assignment]
    process._completions = CompletionTable(4)
    return process, sent


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_feature_that_fails_fails_its_call_alone(call: ToEngine) -> None:
    process, sent = engine_with(BrokenCore(RuntimeError("/a/path")))
    client: Any = process._clients.of(object())  # type: ignore[arg-type]
    process._handle(client, encode(call))
    (answer,) = sent
    assert isinstance(answer, RequestRefused if isinstance(call, AddRequest) else CallFailed)
    assert answer.failure.message == "internal error (RuntimeError)"
    assert 7 in (getattr(answer, "call", None), getattr(answer, "handle", None))


def test_an_engine_that_has_failed_ends() -> None:
    process, sent = engine_with(BrokenCore(EngineDeadError("a step has failed")))
    client: Any = process._clients.of(object())  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        process._handle(client, encode(GetStats(7)))
    assert not sent
