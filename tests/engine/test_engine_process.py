"""The engine's process answers every call, even if a feature fails on its content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.arrays import int32
from quire.engine.loop.calls import RESET_PREFIX_CACHE, SNAPSHOT, STATS
from quire.engine.loop.messages import (
    AddRequest,
    Call,
    CallFailed,
    RequestRefused,
    ToEngine,
    decode_from_engine,
    encode,
)
from quire.engine.process.completions import CompletionTable
from quire.engine.process.process import EngineProcess
from quire.errors import EngineDeadError
from quire.features.call import CallType, encode_body
from quire.features.disaggregation.calls import (
    GRANT,
    HANDSHAKE,
    PEER,
    SET_PEERS,
    GrantRequest,
    PeerChoice,
)
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import PromptRequest
from quire.features.kv_events.calls import EVENTS
from quire.features.lora.calls import LOAD, UNLOAD, LoadAdapter
from quire.sampling_params import SamplingParams

FACTS = KVFacts(0, "", "", "", "", "", 0, [])


def called(call: CallType[Any, Any], request: Any) -> Call:
    return Call(7, call.name, encode_body(request))


CALLS: list[ToEngine] = [
    AddRequest(7, int32([1]), SamplingParams(), 2),
    AddRequest(
        7, int32([1]), SamplingParams(), 2, features={PEER.name: encode_body(PeerChoice("a"))}
    ),
    AddRequest(7, int32([1]), SamplingParams(), 2, features={"none.such": encode_body(1)}),
    called(LOAD, LoadAdapter("name", "path")),
    called(UNLOAD, "name"),
    called(HANDSHAKE, FACTS),
    called(GRANT, GrantRequest(PromptRequest([1], 0, "", "", ""))),
    called(SET_PEERS, ["http://a"]),
    called(STATS, None),
    called(SNAPSHOT, True),
    called(EVENTS, ("", 0)),
    called(RESET_PREFIX_CACHE, None),
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


@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call, "name", "add"))
def test_a_feature_that_fails_fails_its_call_alone(call: ToEngine) -> None:
    process, sent = engine_with(BrokenCore(RuntimeError("/a/path")))
    client: Any = process._clients.of(object())  # type: ignore[arg-type]
    process._handle(client, encode(call))
    (answer,) = sent
    assert isinstance(answer, RequestRefused if isinstance(call, AddRequest) else CallFailed)
    known = "none.such" not in getattr(call, "features", {})
    assert known == (answer.failure.message == "internal error (RuntimeError)")
    assert 7 in (getattr(answer, "call", None), getattr(answer, "handle", None))


def test_an_engine_that_has_failed_ends() -> None:
    process, sent = engine_with(BrokenCore(EngineDeadError("a step has failed")))
    client: Any = process._clients.of(object())  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        process._handle(client, encode(called(STATS, None)))
    assert not sent


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call(7, "none.such", encode_body(1)), "no call"),
        (Call(7, LOAD.name, encode_body(1)), "lora.load: Expected"),
    ],
)
def test_a_call_that_is_unknown_or_of_another_type_is_refused(call: Call, text: str) -> None:
    process, sent = engine_with(BrokenCore(RuntimeError("never asked")))
    client: Any = process._clients.of(object())  # type: ignore[arg-type]
    process._handle(client, encode(call))
    (answer,) = sent
    assert isinstance(answer, CallFailed)
    assert answer.failure.kind == "RequestError"
    assert text in answer.failure.message
