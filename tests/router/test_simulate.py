"""Simulated fleets: engines follow their model, no request is lost, policies differ as expected."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ConfigError
from quire.router.choice import RoutePolicy
from quire.tools.simulate.calibrate import PromptSample, StepSample, encode, fit
from quire.tools.simulate.engine_model import EngineModel, read_engine
from quire.tools.simulate.fleet import SimulatedFleet
from quire.tools.simulate.node import SimulatedNode, SimulatedRequest
from quire.tools.simulate.summary import Summary, summarize
from quire.tools.workload import TraceRequest, WorkloadTrace

MODEL = EngineModel(
    step_seconds=((1, 0.011), (4, 0.014)), prompt_token_seconds=1e-4, context_token_seconds=0.0,
    prompt_pair_seconds=0.0, request_seconds=0.0, max_tokens=100, max_rows=4, kv_tokens=1600,
)  # fmt: skip


def conversations(requests: int, rate: float, seed: int = 0) -> WorkloadTrace:
    draw = random.Random(seed)
    chats = [[user * 10_000] for user in range(20)]
    asked, at = [], 0.0
    for number in range(requests):
        at += draw.expovariate(rate)
        chat = draw.choice(chats)
        chat += [1_000_000 + number * 10 + more for more in range(draw.randint(1, 4))]
        blocks = tuple(chat)
        asked.append(TraceRequest(at, 16 * len(blocks) + 3, draw.randint(1, 30), blocks))
    return WorkloadTrace(asked, 16)


def run(
    trace: WorkloadTrace, policy: RoutePolicy, nodes: int = 4, prefill: int = 0, **change: float
) -> Summary:
    fields = {name: getattr(MODEL, name) for name in MODEL.__struct_fields__}
    model = EngineModel(**{**fields, "kv_tokens": 16_000, **change})
    fleet = SimulatedFleet(nodes, model, policy, trace.block_size, prefill)
    outcome = fleet.run(trace)
    assert len(outcome.flights) == len(trace.requests)
    for state in fleet._states.values():
        assert (state.running, state.waiting) == (0, 0)
    return summarize(outcome, policy, nodes, prefill)


def test_a_step_takes_the_modelled_time() -> None:
    node = SimulatedNode(MODEL, 16)
    first = SimulatedRequest(0.0, 150, 3, tuple(b"%d" % n for n in range(9)))
    node.add(first, 0.0)
    for _ in range(10):
        node.advance(node.wakes)
    # 100 tokens of the prompt, 50, and two steps of one row.
    assert first.first == pytest.approx(0.021 + 0.016)
    assert first.last == pytest.approx(0.037 + 2 * 0.011)
    again = SimulatedRequest(1.0, 150, 1, first.blocks)
    node.add(again, 1.0)
    node.advance(node.wakes)
    assert again.cached == 144
    assert again.first == pytest.approx(1.0 + 0.011 + 6e-4)


def test_prompts_attend_to_earlier_tokens() -> None:
    """A prompt attends to cached tokens, and each step's tokens attend to earlier steps' tokens.

    These pairs count once, because the context covers only rows that generate.
    """
    model = msgspec.structs.replace(MODEL, prompt_pair_seconds=1e-6, context_token_seconds=1.0)
    node = SimulatedNode(model, 16)
    first = SimulatedRequest(0.0, 150, 1, tuple(b"%d" % n for n in range(9)))
    node.add(first, 0.0)
    for _ in range(2):
        node.advance(node.wakes)
    assert first.first == pytest.approx(0.021 + 0.016 + 1e-6 * 150 * 150 / 2)
    again = SimulatedRequest(1.0, 150, 1, first.blocks)
    node.add(again, 1.0)
    node.advance(node.wakes)
    assert again.first == pytest.approx(1.0 + 0.011 + 6e-4 + 1e-6 * 6 * 147)


def test_an_arrival_cuts_steps_short() -> None:
    node = SimulatedNode(MODEL, 16)
    node.add(SimulatedRequest(0.0, 10, 100, ()), 0.0)
    node.advance(node.wakes)
    begin = node.step.begin if node.step is not None else 0.0
    node.add(SimulatedRequest(0.5, 10, 1, ()), 0.5)
    # The running step ends first.
    assert 0.5 <= node.wakes < 0.5 + 0.011
    assert (node.wakes - begin) / 0.011 == pytest.approx(round((node.wakes - begin) / 0.011))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 1), st.floats(1.0, 200.0))
def test_all_requests_end_and_all_blocks_come_back(
    seed: int, nodes: int, prefill: int, rate: float
) -> None:
    trace = conversations(40, rate, seed)
    fleet = SimulatedFleet(nodes + prefill, MODEL, "prefix", 16, prefill)
    outcome = fleet.run(trace)
    assert len(outcome.flights) == 40
    for flight in outcome.flights:
        assert flight.asked.at < flight.request.first <= flight.request.last
        assert 0 <= flight.cached < flight.asked.prompt
    for replica in fleet._replicas:
        cache = replica.node.cache
        assert cache.busy == 0
        assert len(cache._idle) <= cache.most
        assert (replica.state.running, replica.state.waiting) == (0, 0)
        assert replica.node._context == 0


def test_prefixes_are_found_as_in_one_cache() -> None:
    trace = conversations(400, 20.0)
    one = run(trace, "round-robin", nodes=1, kv_tokens=64_000, max_rows=64)
    prefix, blind = run(trace, "prefix"), run(trace, "round-robin")
    assert prefix.hit_rate >= 0.95 * one.hit_rate
    assert blind.hit_rate < prefix.hit_rate
    assert prefix.ttft_p50_s < blind.ttft_p50_s


def test_prompts_are_computed_apart_where_others_would_wait() -> None:
    trace = conversations(300, 20.0)
    whole, apart = run(trace, "prefix"), run(trace, "prefix", prefill=2, handover_seconds=1e-3)
    assert apart.apart > 0.3
    assert apart.itl_p99_s < whole.itl_p99_s
    far = run(trace, "prefix", prefill=2, handover_seconds=10.0)
    assert far.apart < 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        '{"step_seconds": -1}', '{"step_seconds": []}', '{"step_seconds": [[1, 0.0]]}',
        '{"step_seconds": [[4, 0.1], [2, 0.1]]}', '{"max_rows": 0}', '{"speed": 1}', "x",
    ],
)  # fmt: skip
def test_wrong_models_are_refused(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(wrong)
    with pytest.raises(ConfigError, match="engine"):
        read_engine(file)


def test_the_fit_finds_the_coefficients() -> None:
    steps = [
        StepSample(rows, context, MODEL.step(0, rows, context))
        for rows in (1, 4)
        for context in (50 * rows, 1000 * rows)
    ]
    model = msgspec.structs.replace(MODEL, request_seconds=0.002, prompt_pair_seconds=1e-7)
    prompts = []
    for tokens in (80, 200, 450, 1600):  # of more than 100 in several steps
        node = SimulatedNode(model, 16)
        alone = SimulatedRequest(0.0, tokens, 1, ())
        node.add(alone, 0.0)
        while node.step is not None:
            node.advance(node.wakes)
        prompts.append(PromptSample(tokens, model.request_seconds + alone.first))
    found = fit(steps, prompts, MODEL)
    assert [rows for rows, _ in found.step_seconds] == [1, 4]
    for rows in (0, 1, 3, 4, 16):
        assert found.rows_seconds(rows) == pytest.approx(0.01 + 1e-3 * max(rows, 1))
    for name in set(MODEL.__struct_fields__) - {"step_seconds"}:
        wanted = getattr(model, name)
        assert getattr(found, name) == pytest.approx(wanted, rel=1e-3, abs=1e-9), name


def test_the_command(tmp_path: Path) -> None:
    trace, engine, out = (tmp_path / name for name in ("t.jsonl", "e.json", "o.csv"))
    fields = {"input_length": 600, "output_length": 5}
    lines = ({**fields, "timestamp": 200 * n, "hash_ids": [n % 3, 9]} for n in range(20))
    trace.write_text("\n".join(map(json.dumps, lines)))
    engine.write_bytes(encode(EngineModel()))
    words = ["simulate", "--trace", str(trace), "--engine", str(engine), "--nodes", "2"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "ttft_p50_s" in done.stdout.splitlines()[0]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["prefix", "least-loaded", "round-robin"]
    assert float(rows[0]["hit_rate"]) > float(rows[2]["hit_rate"]) > 0.0
    for wrong in (
        ["--policy", "best"], ["--prefill-nodes", "2"], ["--speed", "0"], ["--out", str(tmp_path)],
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*words, *wrong])
        assert isinstance(refused.exception, ConfigError), wrong
        assert "simulated" not in refused.output, wrong
    for wrong in (["simulate"], ["simulate", "--calibrate", "http://127.0.0.1:1"]):
        assert isinstance(CliRunner().invoke(app, wrong).exception, ConfigError)
