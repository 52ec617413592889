"""The load generator: its arithmetic, its requests, and its clients with a faulty server."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.tools.bench.online import load
from quire.tools.bench.online.client import Answer
from quire.tools.bench.online.drive import Server, drive, processes_for
from quire.tools.bench.online.sweep import (
    SweepPlan,
    failures,
    highest_rate,
    parse_aims,
    parse_goodput,
    summary,
)
from quire.tools.workload import chat_trace


def answer(sent: float, times: list[float], *, tokens: int, error: str = "") -> Answer:
    return Answer(
        0, sent, times[-1] if times else sent, np.asarray(times).tobytes(), 10, tokens, 4, error
    )


def test_figures() -> None:
    answers = [
        answer(1.0, [1.1, 1.2, 1.4], tokens=3),
        answer(1.0, [1.3, 1.5], tokens=5),  # two events with five tokens
        answer(1.5, [2.0], tokens=1),
        answer(1.5, [], tokens=0, error="503: no room"),
    ]
    found = summary(answers, percentiles=(50,), goodput={"ttft": 350.0, "tpot": 60.0})
    assert found["requests"] == 3
    assert found["failed"] == 1
    assert found["seconds"] == pytest.approx(1.0)
    assert found["output_tok_s"] == pytest.approx(9.0)
    assert found["total_tok_s"] == pytest.approx(39.0)
    assert found["cached_tokens"] == 12
    assert found["ttft_p50_ms"] == pytest.approx(300.0)
    assert found["tpot_mean_ms"] == pytest.approx((150.0 + 50.0) / 2)
    assert found["itl_mean_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert found["e2el_p50_ms"] == pytest.approx(500.0)
    # The first request is too slow between tokens and the third until its first token; the second
    # is good.
    assert found["goodput_s"] == pytest.approx(1.0)
    assert failures(answers) == ["1 x 503: no room"]
    assert summary([answers[3]]) == {"requests": 0, "failed": 1}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "itl:5", "ttft:nan"])
def test_invalid_goodput_targets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput takes"):
        parse_goodput([text])


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.7, 130.0])
def test_the_search_finds_the_highest_rate(capacity: float) -> None:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= capacity

    found = highest_rate(keeps, 4.0)
    assert found is not None
    assert capacity / 1.05 <= found <= capacity
    assert len(tried) <= 14
    assert len(set(tried)) == len(tried)


def test_the_search_ends_without_a_bound() -> None:
    assert highest_rate(lambda rate: False, 4.0) is None
    assert highest_rate(lambda rate: True, 4.0) == 4.0 * 2**23


def test_aims() -> None:
    aims = parse_aims(["ttft:500", "itl:30"], 99)
    good = {"requests": 3.0, "failed": 0.0, "ttft_p99_ms": 500.0, "itl_p99_ms": 20.0}
    assert aims.misses(good) == []
    assert aims.misses({**good, "itl_p99_ms": 31.0}) == ["itl_p99_ms 31.0 > 30"]
    assert aims.misses({**good, "failed": 1.0}) == ["1 requests failed"]
    with pytest.raises(ConfigError, match="slo takes ttft, tpot, itl or e2el"):
        parse_aims(["first:3"], 99)
    with pytest.raises(ConfigError, match="slo_percentile"):
        parse_aims(["itl:3"], 0)


def test_random_asks() -> None:
    lengths = load.Lengths(input_len=100, output_len=50, spread=0.5, prefix_len=7)
    asks = load.random_asks(40, lengths, 1000, seed=3)
    assert asks == load.random_asks(40, lengths, 1000, seed=3)
    assert len({tuple(ask.prompt[:7]) for ask in asks}) == 1
    assert all(57 <= len(ask.prompt) <= 157 and 25 <= ask.output_len <= 75 for ask in asks)
    assert len({len(ask.prompt) for ask in asks}) > 5
    assert all(10 <= token < 1000 for ask in asks for token in ask.prompt)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="spread"):
        load.Lengths(spread=1.0)


def test_datasets(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"prompt": "a", "output_len": 3}\n\n{"prompt": [1, 2], "output_len": 4}\n{}\n'
    )
    assert sorted(ask.output_len for ask in load.file_asks(lines, 4, None, 0)) == [3, 3, 4, 4]
    assert {ask.output_len for ask in load.file_asks(lines, 2, 9, 0)} == {9}
    shared = tmp_path / "shared.json"
    turns = [{"value": "Hello?"}, {"value": "x" * 40}]
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert load.file_asks(shared, 1, None, 0) == [load.Ask("Hello?", 10)]
    with pytest.raises(ConfigError, match="dataset"):
        load.file_asks(tmp_path / "none", 1, None, 0)
    shared.write_text("[{}]")
    with pytest.raises(ConfigError, match="no entry"):
        load.file_asks(shared, 1, None, 0)


def test_arrivals() -> None:
    for burstiness in (0.3, 1.0, 5.0):
        times = load.arrivals(4000, 20.0, burstiness, seed=1)
        assert times[0] == 0.0
        assert times == sorted(times)
        assert times[-1] / 4000 == pytest.approx(1 / 20, rel=0.15)


def test_the_times_of_a_trace_are_scaled_to_a_rate() -> None:
    trace = chat_trace(50)
    at = SweepPlan(trace=trace, rate=2 * trace.rate).send_at(50, 0)
    assert at == pytest.approx([request.at / 2 for request in trace.requests])
    assert SweepPlan(trace=trace).send_at(50, 0) is None


def test_invalid_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="text"):
        SweepPlan(endpoint="chat", prompts="ids")
    with pytest.raises(ConfigError, match="endpoint"):
        SweepPlan(endpoint="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="as text"):
        load.body(load.Ask([1], 1), "m", "chat", {})


def test_processes() -> None:
    assert [processes_for(n, None) for n in (1, 16, 17, 64, 1000)] == [1, 1, 2, 4, 8]
    assert processes_for(1000, 3) == 3


class Streams(BaseHTTPRequestHandler):
    """Answers as the prompt demands."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        how = asked["prompt"]
        if how == "busy":
            self.send_response(503)
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"busy")
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        usage = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": None}
        events = [json.dumps({"choices": [{"text": "a\n\nb"}]})] * 3
        if how != "early":
            events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        if how == "error":
            events[2] = json.dumps({"error": {"message": "broke"}})
        data = "".join(f"data: {event}\n\n" for event in events).encode()
        for piece in (data[:30], data[30:31], data[31:]):  # not at the events' edges
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/completions"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("send_at", [None, [0.0, 0.01, 0.01, 0.02, 0.03, 0.03, 0.04]])
def test_clients(url: str, send_at: list[float] | None) -> None:
    kinds = ["good", "busy", "good", "early", "good", "error", "good"]
    bodies = [load.body(load.Ask(kind, 4), "m", "completions", {}) for kind in kinds]
    answers, cpu = drive(url, {}, bodies, concurrency=3, processes=2, send_at=send_at)
    assert 0.0 <= cpu < 2.0
    assert [answer.index for answer in answers] == list(range(7))
    for kind, got in zip(kinds, answers, strict=True):
        assert (got.error == "") == (kind == "good")
        if kind == "good":
            assert len(got.times) == 3
            assert (got.prompt_tokens, got.output_tokens, got.cached_tokens) == (7, 4, 0)
            assert got.sent <= got.times[0] <= got.ended
    assert answers[1].error == "503: busy"
    assert "early" in answers[3].error
    assert "broke" in answers[5].error


def test_an_unreachable_server_is_an_error() -> None:
    (answer,), _ = drive("http://127.0.0.1:9/v1", {}, [b"{}"], concurrency=1, processes=1)
    assert answer.error


@pytest.mark.parametrize("said", [b"<html>", b"[]", b"null", b'{"data": 3}', b"\xff", b""])
def test_servers_of_another_kind(said: bytes) -> None:
    with listening(said) as port:
        for path in ("", "/v1"):
            with pytest.raises(ConfigError, match="does not answer as it should"):
                Server(f"127.0.0.1:{port}{path}").model()


def test_a_server_without_http_is_an_error() -> None:
    with listening(b"SSH-2.0", head=b"") as port, pytest.raises(ConfigError, match="cannot reach"):
        Server(f"127.0.0.1:{port}").model()


@contextlib.contextmanager
def listening(said: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Iterator[int]:
    """Listens on a port and answers any request with these bytes."""

    class Says(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(head + said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Says) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
