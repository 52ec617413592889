"""Predictions of `quire roofline`, compared with records, and unsupported cards and dtypes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import roofline_error
from quire.arrays import int32
from quire.cli.main import app
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.errors import ConfigError
from quire.tools.bench.cases import Case, parse_case
from quire.tools.profile.kernel_kinds import kind_of
from quire.tools.roofline import roofline as module
from quire.tools.roofline.roofline import Roofline, schedule

CONFIGS = Path(__file__).parents[2] / "bench" / "configs"


def config(name: str = "qwen3-0.6b", **options: object) -> EngineConfig:
    args = EngineArgs(model=str(CONFIGS / name), dtype="bfloat16", device="cpu", **options)  # type: ignore[arg-type]
    return resolve(args)


def command(*arguments: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["roofline", *arguments, "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def test_mean_error_over_the_records() -> None:
    found = list(roofline_error.rows())
    plain = [row for row in found if row.plain]
    quantized = [row for row in found if not row.plain]
    assert len(plain) >= 36
    assert {row.ranks for row in found} == {1, 2, 4}
    assert {row.quantization for row in quantized} >= {"int8", "fp8", "int4", "int4,head=int8"}
    assert roofline_error.mean_error(plain) < 6.0
    assert roofline_error.mean_error(quantized) < 6.0
    page = (CONFIGS.parents[1] / "docs" / "roofline.md").read_text("utf-8")
    assert roofline_error.summary("In 16 bits", plain) in page
    assert roofline_error.summary("Quantized", quantized) in page
    # One record is older than the kernel of its products: 64 rows of 8-bit weights on two ranks.
    *others, largest = sorted(abs(row.percent) for row in found)
    assert others[-1] < 15.0
    assert largest < 25.0


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(1, 8),
)
@settings(max_examples=60)
def test_schedule(requests: list[tuple[int, int]], tokens: int, most: int) -> None:
    tokens = max(tokens, most)
    prompts, outputs = map(list, zip(*requests, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_TOKENS", tokens)
        patch.setattr(module, "MAX_REQUESTS", most)
        steps = list(schedule(prompts, outputs))
    assert all(0 < int(step.count.sum()) <= tokens for step in steps)
    assert all(0 < len(step.count) <= most for step in steps)
    # The last token of a request is not computed.
    assert sum(int(step.count.sum()) for step in steps) == sum(prompts) + sum(outputs) - len(
        prompts
    )
    assert sum(step.logit_rows for step in steps) == sum(outputs)
    assert sum(step.first_tokens for step in steps) == len(prompts)
    if len(prompts) == 1:
        assert steps[-1].held == prompts[0] + outputs[0] - 1


def test_one_stream_is_bound_by_bytes_and_launches() -> None:
    (found,) = Roofline(config(), "h200").case(parse_case("b1"))
    assert found.kinds["projections"].bound == "launches"
    assert found.kinds["head"].bound == "bytes"
    assert found.seconds == pytest.approx(sum(kind.seconds for kind in found.kinds.values()))
    assert found.decode_seconds == pytest.approx(1 / found.output_tok_s, rel=0.02)
    (prompt,) = Roofline(config("qwen3-8b"), "h200").case(parse_case("1x8192x1"))
    assert prompt.kinds["projections"].bound == "FLOPs"
    assert prompt.first_token_seconds == prompt.seconds


def test_ranks_share_weights_and_add_collectives() -> None:
    one = Roofline(config("qwen3-8b"), "h200").case(parse_case("b64"))[0]
    two = Roofline(config("qwen3-8b", tensor_parallel_size=2), "h200").case(parse_case("b64"))[0]
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.001)
    assert two.kv_bytes == one.kv_bytes / 2
    assert one.seconds / 2 < two.seconds < one.seconds
    assert two.kinds["collectives"].seconds > 0
    assert "collectives" not in one.kinds


def test_few_bits_halve_weights() -> None:
    plain = Roofline(config("qwen3-8b"), "h200").work
    eight = Roofline(config("qwen3-8b", quantization="int8"), "h200").work
    assert eight.body_bytes == pytest.approx(plain.body_bytes / 2, rel=0.01)
    assert eight.head_bytes == plain.head_bytes
    both = Roofline(config("qwen3-8b", quantization="int8,head=int8"), "h200")
    assert both.work.body_bytes == eight.body_bytes
    assert both.work.head_bytes == pytest.approx(plain.head_bytes / 2, rel=0.001)
    assert both.bandwidth_shares["head"] < 1


def test_a_head_with_weights_of_its_own_leaves_the_embeddings() -> None:
    """Qwen3-0.6B ties its head to the embeddings."""
    tied = Roofline(config("qwen3-0.6b"), "h200")
    own = Roofline(config("qwen3-0.6b", quantization="head=int8"), "h200")
    assert tied.work.tied
    assert own.weight_bytes - tied.weight_bytes == own.work.head_bytes
    assert own.work.head_bytes == 151936 * (1024 + 4)


@pytest.mark.parametrize(
    ("card", "options", "message"),
    [
        ("abacus", {}, "unknown card 'abacus'; expected one of: h200"),
        ("l4", {"tensor_parallel_size": 2}, "no link between several NVIDIA L4"),
    ],
)
def test_refused_cards(card: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Roofline(config(**options), card)


def test_refused_dtypes_and_lengths() -> None:
    with pytest.raises(ConfigError, match="the ceilings of NVIDIA H200 in float32 are unknown"):
        Roofline(replace(config(), dtype="float32"), "h200")
    with pytest.raises(ConfigError, match="needs sequences of 100001 tokens"):
        Roofline(config(), "h200").case(parse_case("1x100000x1"))


def test_experts_are_read_as_far_as_tokens_take_them() -> None:
    work = Roofline(config("qwen3-30b-a3b"), "h200").work
    assert work.experts.bytes == 48 * 128 * 3 * 2048 * 768 * 2
    assert work.experts.flops == 48 * 8 * 2 * 3 * 2048 * 768
    assert work.experts.touched(1) == pytest.approx(work.experts.bytes * 8 / 128)
    assert work.experts.touched(1000) == pytest.approx(work.experts.bytes)
    parts = work.parts_of_step(int32([5]), int32([1]), 1)
    assert set(parts) == {"projections", "attention", "experts", "embedding", "head"}


def test_states_do_not_grow() -> None:
    line = Roofline(config("qwen3.5-27b"), "h200")
    assert line.work.state_layers == 3 * line.work.attention_layers == 48
    short, long = (line.work.parts_of_step(int32([n]), int32([1]), 1) for n in (10, 10000))
    assert short["states"] == long["states"] == (2 * line.work.state_bytes, line.work.state_flops)
    # fp32 [48 heads, 128, 128] and the last 3 inputs of the convolution, in bf16.
    assert line.work.state_bytes == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert long["attention"][0] > short["attention"][0]


def test_command() -> None:
    folder = str(CONFIGS / "qwen3-8b")
    status, found = command(folder, "--case", "b1", "--quantization", "fp8", "--no-run")
    assert status == 0
    assert found["card"] == "NVIDIA H200"
    (prediction,) = found["predictions"]  # type: ignore[misc]
    assert prediction["fits"] is True
    assert prediction["weights_gb"] == pytest.approx(9.4, abs=0.2)
    assert np.isclose(sum(kind["percent"] for kind in prediction["kinds"].values()), 100.0)


def test_the_command_names_cases_that_do_not_fit() -> None:
    done = CliRunner().invoke(
        app, ["roofline", str(CONFIGS / "qwen3-8b"), "--card", "l4", "--case", "b64"]
    )
    assert done.exit_code == 0
    assert "do not fit" in " ".join(done.output.split())


def test_the_command_runs_the_predicted_cases() -> None:
    arguments = ["--device", "cpu", "--run", "--kernels", "--case", "2x32x8", "--case", "ttft"]
    status, found = command(*arguments)
    assert status == 0
    assert found["ceilings"]["origin"] == "measured now"  # type: ignore[index]
    case, prompt = found["predictions"]  # type: ignore[misc]
    assert case["measured"]["weights_gb"] == pytest.approx(case["weights_gb"], rel=0.01)
    # Two requests of 39 tokens, in blocks of 16.
    assert case["measured"]["kv_gb"] == pytest.approx(case["kv_gb"] * 48 / 39, rel=0.01)
    for name in ("output_tok_s", "decode_step_ms", "first_token_ms"):
        off = case["residual_percent"][name]
        assert off == pytest.approx(100 * (case[name] / case["measured"][name] - 1))
    assert case["measured"]["first_token_ms"] < 1e3 * case["measured"]["seconds"]
    assert prompt["case"] == "ttft 512"
    assert prompt["residual_percent"].keys() == {"first_token_ms", "weights_gb"}
    for each in (case, prompt):
        kinds = each["measured_kinds"]
        assert kinds.keys() == {"products", "attention", "norms", "others"}
        whole = sum(kind["ms"] for kind in each["kinds"].values())
        assert sum(kind["predicted_ms"] for kind in kinds.values()) == pytest.approx(whole)
        assert kinds["products"]["measured_ms"] > kinds["norms"]["measured_ms"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("gemv_kernel", "products"),
        ("nvjet_sm90_tst_64x64_64x13_4x1_v_bx_splitK_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16", "products"),
        ("attend_short", "attention"),
        ("combine", "attention"),
        ("combine_kernel", "experts"),
        ("up_gemv_kernel", "experts"),
        ("mma_rows_kernel", "experts"),
        ("mma_sum_kernel", "experts"),
        ("eight_bit_kernel", "products"),
        ("_sum_kernel", "products"),
        ("_round_kernel", "norms"),
        ("_qk_norm_rope_store", "norms"),
        ("_recurrent", "states"),
        ("delta_scan", "states"),
        ("scan", "others"),
        ("Memcpy HtoD ", "others"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run"], "cannot run: there is no GPU here, and NVIDIA H200 is predicted"),
        (["--run", "--device", "cpu", "--card", "l4"], "a CPU is not a NVIDIA L4"),
        (["--device", "cpu", "--tp", "2"], "no link between several"),
    ],
)
def test_command_says_why_it_cannot_run(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["roofline", "--case", "b1", *arguments], catch_exceptions=False)


def test_command_runs_by_itself_where_the_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ran: list[str] = []

    def run(_: object, device: str, cases: list[Case], *rest: object, **more: object) -> list[Any]:
        ran.extend([device, *(case.name for case in cases)])
        return []

    monkeypatch.setattr("quire.cli.roofline._run", run)
    folder = str(CONFIGS / "qwen3-8b")
    for here, extra, runs in (
        ("NVIDIA L40S", [], []),
        ("NVIDIA H200", ["--no-run"], []),
        ("NVIDIA H200", ["--tp", "2"], []),
        ("NVIDIA H200", [], ["cuda", "b1"]),
        ("NVIDIA L4", ["--card", "l4"], ["cuda", "b1"]),
    ):
        ran.clear()
        monkeypatch.setattr("quire.cli.roofline.card_name", lambda device, name=here: name)
        # Cases that do not fit are not run.
        command(folder, "--case", "b1", "--case", "128x8192x2048", *extra)
        assert ran == runs, (here, extra)
