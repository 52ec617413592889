"""Sums over the steps of a run: bytes, FLOPs, KV utilization, latencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.models import load_config
from quire.plan import Admit, KVGroup, RowFlag, StepPlan
from quire.sampling_params import SamplingParams
from quire.tools.bench.latency import Timeline, summary, timeline
from quire.tools.bench.model_work import model_work
from quire.tools.bench.throughput import step_metrics
from quire.tools.bench.trace import SeenStep, StepTotals, sum_up
from quire.tools.bench.work import AttentionWork, Ceilings, ModelWork, attended, ceilings

LAST_CHUNK = RowFlag.PROMPT | RowFlag.SAMPLE
WORK = ModelWork(
    body_bytes=1000,
    head_bytes=100,
    body_flops=10,
    head_flops=7,
    embedding_bytes=2,
    linear_layers=1,
    attention=((AttentionWork(None, 4, 3), 1),),
)
GROUP = KVGroup(layers=(0,), tokens_per_block=4, block_bytes=16)


def brute_force(first: int, count: int, window: int | None) -> tuple[int, int]:
    seen: set[int] = set()
    pairs = 0
    for query in range(first, first + count):
        low = 0 if window is None else max(0, query - window + 1)
        seen |= set(range(low, query + 1))
        pairs += query + 1 - low
    return len(seen), pairs


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_attended_positions(window: int | None) -> None:
    rows = [(0, 1), (0, 5), (7, 1), (2, 9), (20, 3), (3, 30)]
    for first, count in rows:
        assert attended(int32([first]), int32([count]), window) == brute_force(first, count, window)
    together = attended(int32([f for f, _ in rows]), int32([n for _, n in rows]), window)
    alone = [brute_force(first, count, window) for first, count in rows]
    assert together == (sum(s for s, _ in alone), sum(p for _, p in alone))


def step(
    lanes: list[int],
    q_len: list[int],
    flags: list[int],
    *,
    tokens: list[int],
    at: float,
    used: int,
    admits: tuple[int, ...] = (),
    frees: tuple[int, ...] = (),
) -> SeenStep:
    plan = StepPlan(
        step_id=0,
        lanes=int32(lanes),
        q_len=int32(q_len),
        n_logits=int32(tokens),
        flags=int32(flags),
        admits=[Admit(lane, 0, "", int32([]), 0, 0, 9, SamplingParams(), 0) for lane in admits],
        frees=list(frees),
    )
    return SeenStep(plan, [used], int32(tokens), gpu_us=2e5, collected=at)


def run() -> list[SeenStep]:
    """Steps: two prompts of 3 and 5 tokens, the second in two chunks; another token of the first;
    then another request on the first one's lane."""
    return [
        step([0, 1], [3, 2], [LAST_CHUNK, 1], tokens=[1, 0], at=11.0, used=2, admits=(0, 1)),
        step([0, 1], [1, 3], [RowFlag.SAMPLE, LAST_CHUNK], tokens=[1, 1], at=12.0, used=3),
        step([0], [2], [LAST_CHUNK], tokens=[1], at=14.0, used=3, admits=(0,), frees=(0,)),
    ]


def test_totals_of_a_run() -> None:
    totals = sum_up(run(), 10.0, WORK, [GROUP], 10, Ceilings(1000.0, 100.0, "measured"))
    assert (totals.steps, totals.rows) == (3, 5)
    assert totals.gpu_seconds == pytest.approx(0.6)
    # Weights and head three times; 11 tokens' embeddings and KV written; KV read: 3+2, 4+5, 2.
    assert totals.bytes == 3 * 1100 + 11 * 2 + (11 + 5 + 9 + 2) * 4
    # Pairs: 6 + 3, 4 + (3 + 4 + 5), 3.
    assert totals.flops == 11 * 10 + 4 * 7 + (9 + 16 + 3) * 3
    # At 1000 bytes/s and 100 FLOP/s all three steps are bound by bytes.
    assert totals.bound_seconds == pytest.approx(totals.bytes / 1000)
    fewer = sum_up(run(), 10.0, WORK, [GROUP], 10, Ceilings(1e9, 1.0, "measured"))
    assert fewer.bound_seconds == pytest.approx(totals.flops)
    # Stored tokens 5, 9, 7, for 1, 1 and 2 seconds; a token is 4 bytes, a block 16.
    assert totals.stored == pytest.approx(4 * (5 + 9 + 2 * 7) / 4)
    assert totals.allocated == pytest.approx(16 * (2 + 3 + 2 * 3) / 4)
    assert totals.reserved == pytest.approx(4 * 2 * 10)


def test_totals_of_nothing() -> None:
    totals = sum_up([], 0.0, WORK, [GROUP], 10, None)
    assert totals == StepTotals(0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert step_metrics(totals, 1.0, None) == {"steps": 0, "mean_batch": 0}


def test_windows_keep_no_more_than_their_width() -> None:
    group = KVGroup(layers=(0,), kind="window", window=3, tokens_per_block=4, block_bytes=16)
    totals = sum_up(run()[:1], 10.0, WORK, [group], 10, None)
    assert totals.stored == 4 * (3 + 2)
    totals = sum_up(run()[:2], 11.0, WORK, [group], 10, None)
    assert totals.stored == 4 * (3 + 3)


def test_metrics_of_totals() -> None:
    totals = StepTotals(
        steps=10,
        rows=25,
        gpu_seconds=1.5,
        bytes=4e12,
        flops=7e13,
        bound_seconds=1.2,
        stored=3,
        allocated=4,
        reserved=30,
    )
    metrics = step_metrics(totals, 2.0, Ceilings(4e12, 700e12, "measured"))
    assert metrics == pytest.approx(
        {
            "steps": 10,
            "mean_batch": 2.5,
            "cpu_overhead_percent": 25,
            "bandwidth_percent": 50,
            "mfu_percent": 5,
            "bound_percent": 60,
            "kv_utilization_percent": 75,
            "kv_utilization_reserved_percent": 10,
        }
    )
    assert "mfu_percent" not in step_metrics(totals, 2.0, None)


def test_ceilings() -> None:
    h200 = ceilings("NVIDIA H200", "bfloat16")
    assert h200 is not None
    assert h200.described() == {
        "memory_tb_s": 4.25,
        "matmul_tflop_s": 700,
        "origin": "measured",
    }
    assert ceilings("NVIDIA H200", "float32") is None
    assert ceilings("some CPU", "bfloat16") is None


def test_work_of_a_model_follows_from_its_shapes() -> None:
    config = resolve(EngineArgs(device="cpu"))
    hf = load_config(config.model_path)
    work = model_work(config)
    vocab, hidden = hf["vocab_size"], hf["hidden_size"]
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    assert work.head_flops == 2 * vocab * hidden
    assert work.head_bytes == 4 * vocab * hidden
    head_dim = hf.get("head_dim") or hidden // heads
    qkv = (heads + 2 * hf["num_key_value_heads"]) * head_dim * hidden
    mlp = 3 * hf["intermediate_size"] * hidden
    assert work.body_flops == 2 * layers * (qkv + heads * head_dim * hidden + mlp)
    # All weights are fp32, and apart from the matrices there are only norms and biases.
    assert work.body_bytes == pytest.approx(2 * work.body_flops, rel=0.02)
    kv_bytes = 2 * hf["num_key_value_heads"] * head_dim * 4
    assert work.attention == ((AttentionWork(None, kv_bytes, 4 * heads * head_dim), layers),)
    assert work.linear_layers == 4 * layers
    assert Path(config.model_path).name == "quire-tiny"


def test_timeline_of_a_request() -> None:
    steps = [
        step([0], [2], [1], tokens=[0], at=10.1, used=1, admits=(0,)),
        step([0], [2], [LAST_CHUNK], tokens=[1], at=10.2, used=1),
        step([0], [1], [RowFlag.SAMPLE], tokens=[2], at=10.5, used=1),
    ]
    line = timeline(steps, 10.0, 0.6)
    assert line.ttft == pytest.approx(200)
    assert line.gaps == pytest.approx([300, 0])
    assert line.total == pytest.approx(600)


def test_latency_percentiles() -> None:
    lines = [Timeline(float(i), [1.0, 3.0], 100.0) for i in range(1, 12)]
    metrics = summary(lines, output_len=3)
    assert metrics["requests"] == 11
    assert metrics["ttft_p50_ms"] == 6
    assert metrics["ttft_p95_ms"] == pytest.approx(10.5)
    assert metrics["itl_p50_ms"] == pytest.approx(float(np.median([1.0, 3.0] * 11)))
    assert metrics["itl_p99_ms"] == 3
    assert metrics["e2e_p95_ms"] == 100
    assert metrics["output_tok_s"] == pytest.approx(30)
    assert "itl_p50_ms" not in summary([Timeline(1.0, [], 2.0)], 1)
