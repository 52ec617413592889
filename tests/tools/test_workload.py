"""Traces of requests: published formats, and the one that is made."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.tools.bench.online.load import trace_asks
from quire.tools.workload import TraceRequest, WorkloadTrace, chat_trace, read_trace


def line(**change: object) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps({**fields, **change}) + "\n"


def test_formats_with_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line(timestamp=3000) + line(timestamp=1000) + "\n")
    mooncake = read_trace(file, speed=2.0)
    assert (mooncake.block_size, [r.at for r in mooncake.requests]) == (512, [0.0, 1.0])
    assert mooncake.requests[0].blocks == (1,)
    file.write_text(line(chat_id=4, timestamp=1.5, hash_ids=list(range(38))) + line(timestamp=2.5))
    qwen = read_trace(file, most=1)
    assert (qwen.block_size, len(qwen.requests), len(qwen.requests[0].blocks)) == (16, 1, 37)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("{}\n", "line 1"),
        (line() + line(input_length=0), "line 2: lengths"),
        (line(input_length=10**12), "line 1: lengths"),
        (line(output_length=1 << 31), "line 1: lengths"),
        ("nonsense\n", "line 1: neither a JSON object nor a CSV header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,3,4\n", "line 2: Invalid isoformat"),
        ("Timestamp,Request tokens,Response tokens\nnan,3,4\n", "line 2: no time"),
        ("Timestamp,Request tokens,Response tokens\n1,inf,4\n", "line 2"),
        ("Timestamp,Request tokens,Response tokens\n1,2\n", "line 2"),
        ("\xff,\n", "line 1"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n"
        "9.314579,GPT-4,396,109,505,Conversation log\n",
    ],
)
def test_formats_with_lengths_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    first, second = read_trace(file).requests
    assert first == TraceRequest(0.0, 374, 44, ())
    assert (second.prompt, second.output) == (396, 109)
    assert second.at == pytest.approx(4.314579, abs=2e-6)


def test_conversations_repeat_themselves() -> None:
    trace = chat_trace(200, seed=3)
    assert trace == chat_trace(200, seed=3) != chat_trace(200, seed=4)
    assert len(trace.requests) == 200
    times = [request.at for request in trace.requests]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 2.0 < trace.rate < 5.0  # a conversation per second, with some three turns
    for request in trace.requests:
        assert len(request.blocks) == request.prompt // trace.block_size
        assert request.blocks[:32] == trace.requests[0].blocks[:32]  # the system prompt
    by_turn = sorted(trace.requests, key=lambda request: request.blocks)
    grown = [a for a, b in pairwise(by_turn) if b.blocks[: len(a.blocks)] == a.blocks]
    assert len(grown) > 80


def test_prompts_of_a_trace_share_what_it_shares() -> None:
    requests = [
        TraceRequest(0.0, 10, 3, (7, 8)),
        TraceRequest(1.0, 9, 4, (7, 9)),
        TraceRequest(2.0, 3, 5, ()),
    ]
    trace = WorkloadTrace(requests, block_size=4)
    one, two, three = trace_asks(trace, 1000, seed=-1)
    assert [len(ask.prompt) for ask in (one, two, three)] == [10, 9, 3]
    assert [ask.output_len for ask in (one, two, three)] == [3, 4, 5]
    assert one.prompt[:4] == two.prompt[:4]
    assert one.prompt[4:8] != two.prompt[4:8]
    assert trace_asks(trace, 1000, seed=2)[0].prompt[:4] != one.prompt[:4]
