"""Replicas with roles: which one computes a prompt, given their reports."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.peer_list import Peer, PeerError, _reason
from quire.features.kv_events.messages import EngineLoad, KVEventLine, KVEvents
from quire.features.kv_events.prompt_report import decode_report, encode_report
from quire.router.choice import Chooser
from quire.router.prefixes import PrefixMap
from quire.router.prompts import Prompt, read_prompt
from quire.router.replica import ReplicaState, Role
from quire.server.telemetry.tracing import Exporter
from tests.router.fake_replica import FakeReplica, serving
from tests.router.test_routing import ADMIN, routed, run

RATE = 1000.0


def prompt_of(text: str) -> Prompt:
    return read_prompt(json.dumps({"prompt": text}).encode())


def line(
    stored: bytes = b"", removed: bytes = b"", reset: bool = False, **load: float
) -> KVEventLine:
    found = EngineLoad(**{"prefill_rate": RATE, **load})  # type: ignore[arg-type]
    return KVEventLine(True, True, [KVEvents("e", 1, reset, 16, found, stored, removed)])


def state(role: Role, **load: float) -> ReplicaState:
    made = ReplicaState(role)
    made.take_line(line(reset=True, **load))
    made.peers = {0: "http://p"} if role == "decode" else {}
    return made


LONG, SHORT = prompt_of("x" * 40_000), prompt_of("x" * 400)


def test_prompts_are_computed_apart_where_others_decode() -> None:
    chooser = Chooser("prefix")
    fleet = {0: state("prefill"), 1: state("decode", handover_seconds=0.05)}
    # Nothing decodes here, so a handover would only cost time.
    idle = chooser.choose(LONG, fleet)
    assert (idle.index, idle.prefill, len(idle.placements)) == (1, "", 1)
    idle.end()
    fleet[1] = state("decode", handover_seconds=0.05, running=8)
    apart = chooser.choose(LONG, fleet)
    assert (apart.index, apart.prefill) == (1, "http://p")
    assert fleet[0].waiting > 9000
    assert fleet[1].waiting == 0
    apart.answered()
    assert (fleet[0].running, fleet[0].waiting, fleet[1].running) == (0, 0, 1)
    apart.end()
    # The handover costs more than it saves.
    fleet[1] = state("decode", handover_seconds=5.0, running=2)
    assert chooser.choose(SHORT, fleet).prefill == ""
    # Its queue is too long.
    fleet = {0: state("prefill", prompt_tokens=10**6), 1: state("decode", running=8)}
    assert chooser.choose(LONG, fleet).prefill == ""


def test_a_replica_without_grants_is_not_chosen_for_prefill() -> None:
    chooser = Chooser("prefix")
    fleet = {0: state("prefill"), 1: state("decode", running=8)}
    fleet[0].grants = False
    assert chooser.choose(LONG, fleet).prefill == ""
    fleet[0].grants, fleet[1].peers = True, {}
    assert chooser.choose(LONG, fleet).prefill == ""
    # Without a decode replica, a prefill replica runs the whole request.
    alone = chooser.choose(LONG, {0: state("prefill")})
    assert (alone.index, alone.prefill) == (0, None)
    for policy in ("round-robin", "least-loaded"):
        other = Chooser(policy).choose(LONG, fleet)  # type: ignore[arg-type]
        assert (other.index, other.prefill) == (1, None)


def test_events_say_who_holds_a_prompt() -> None:
    chooser = Chooser("prefix")
    fleet = {n: state("both") for n in range(3)}
    for each in fleet.values():
        each.has_room(1 << 20)
    first = chooser.choose(LONG, fleet)
    report = decode_report(encode_report(list(range(10_000)), "", 16))
    assert report is not None
    tokens, blocks = report
    chooser.prefixes.learn(LONG, tokens, blocks)
    known = chooser.prefixes.look_up(LONG)
    assert known.tokens == pytest.approx(10_000, rel=0.01)
    fleet[first.index].settle(LONG.keys, blocks)
    first.end()
    assert fleet[first.index].held_tokens(known) == pytest.approx(10_000, rel=0.02)
    # One replica evicts it, and another one, which had no request, reports it.
    fleet[first.index].take_line(line(removed=b"".join(name for _, name in blocks)))
    assert fleet[first.index].held_tokens(known) == 0
    other = (first.index + 1) % 3
    fleet[other].take_line(line(stored=b"".join(name for _, name in blocks[:32])))
    assert fleet[other].held_tokens(known) == pytest.approx(5000, rel=0.02)
    assert chooser.choose(LONG, fleet).index == other


@given(st.integers(0, 30), st.integers(0, 30), st.floats(2.0, 6.0))
def test_shared_beginnings_are_found_from_earlier_reports(
    shared: int, more: int, ratio: float
) -> None:
    prefixes = PrefixMap()
    first = prompt_of("a" * 256 * shared + "b" * 256 * more)
    tokens = list(range(int(first.size / ratio)))
    report = decode_report(encode_report(tokens, "", 16))
    assert report is not None
    prefixes.learn(first, *report)
    second = prompt_of("a" * 256 * shared + "c" * 256 * more)
    known = prefixes.look_up(second)
    ends = [end for end, _ in known.blocks]
    assert ends == sorted(set(ends))
    assert all(end <= 256 * (shared + 1) / ratio for end in ends)
    if shared > 2 and len(report[1]) < 64:
        assert ends[-1] >= 256 * (shared - 2) / ratio - 16


def test_roles_over_http() -> None:
    async def main() -> None:
        writer, reader = FakeReplica(), FakeReplica(events=asyncio.Queue())
        reader.gate.set()
        reader.report = encode_report(list(range(1000)), "", 16)
        assert reader.events is not None
        async with routed(writer, reader, roles=("prefill", "decode")) as setup:
            first, second = setup.fleet
            await setup.until(lambda: bool(second.state.peers))
            assert reader.peers == [writer.url]
            assert writer.peers == []
            reader.events.put_nowait(line(reset=True, running=8))
            await setup.until(lambda: second.state.informed)
            forged = {"x-quire-prefill": "http://evil", "x-quire-report-prompt": "1"}
            answer = await setup.ask(json={"prompt": "x" * 4000}, headers=forged)
            assert answer.status_code == 200
            assert "x-quire-prompt" not in answer.headers
            sent = reader.seen[-1][2]
            assert sent["x-quire-prefill"] == writer.url
            assert sent["x-quire-report-prompt"] == "1"
            assert not writer.seen
            assert (first.state.running, second.state.running) == (0, 0)
            # The prompt is cached now, so the answering replica computes its few other tokens.
            known = setup.fleet.chooser.prefixes.look_up(prompt_of("x" * 4000))
            assert second.state.held_tokens(known) > 900
            page = (await setup.http.get("/replicas", headers=ADMIN)).json()["replicas"]
            assert [each["role"] for each in page] == ["prefill", "decode"]
            assert [each["informed"] for each in page] == [False, True]
            metrics = (await setup.http.get("/metrics", headers=ADMIN)).text
            assert 'quire_router_prompts_total{where="apart"} 1.0' in metrics
            # The decode replica is lost, so the other one runs the whole request.
            writer.gate.set()
            reader.die()
            assert (await setup.ask(json={"prompt": "x" * 4000})).status_code == 200
            assert "x-quire-prefill" not in writer.seen[-1][2]
            assert not second.state.informed

    run(main)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_trace_spans_router_and_replicas() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    exporter = Exporter("http://127.0.0.1:1", "quire-router")
    exporter._provider._active_span_processor._span_processors = (SimpleSpanProcessor(kept),)

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, exporter=exporter) as setup:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert (await setup.ask(headers=headers)).status_code == 200
            await setup.until(lambda: bool(kept.get_finished_spans()))
            (span,) = kept.get_finished_spans()
            assert span.context is not None
            assert span.parent is not None
            assert format(span.parent.span_id, "016x") == PARENT
            own = format(span.context.span_id, "016x")
            assert replica.seen[-1][2]["traceparent"] == f"00-{TRACE}-{own}-01"
            assert span.attributes is not None
            assert span.attributes["quire.replica"] == replica.url.partition("//")[2]
            assert span.attributes["http.response.status_code"] == 200
            # The decode replica passes the trace on to the prefill replica.
            peer = Peer(replica.url, None, KVFacts(3, "", "tcp", "", "", "", 16, ()))
            peer._epoch = "e"
            with pytest.raises(PeerError, match="no valid answer"):
                await asyncio.to_thread(peer.ask, [1] * 16, 0, "", headers["traceparent"])
            assert replica.seen[-1][1] == "/kv/prefill"
            assert replica.seen[-1][2]["traceparent"] == headers["traceparent"]

    run(main)


def test_peers_that_answer_no_utf8() -> None:
    async def main() -> None:
        replica = FakeReplica(parts=(b'{"name": "\xff", "epoch": "\xff"}',))
        async with serving(replica) as url:
            peer = Peer(url, None, KVFacts(3, "", "tcp", "", "", "", 16, ()))
            with pytest.raises(PeerError, match="no valid answer") as caught:
                await asyncio.to_thread(peer.ask, [1] * 16, 0, "")
            assert caught.value.outcome == "broken"

    run(main)
    assert _reason(b'{"error": {"message": "\xff"}}').startswith('{"error"')
