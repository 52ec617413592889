"""Profiles count every moment once, and cover the requested steps."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ConfigError
from quire.llm import LLM
from quire.tools.bench.record import read_jsonl
from quire.tools.profile.profile import Profile, Profiler, charged, innermost
from tests.tiny_engine import TINY, model_folder


def test_a_kernel_is_charged_for_the_time_it_outlasts_others() -> None:
    spans = [("a(int)", 0, 10), ("b", 2, 8), ("b", 5, 14), ("a(float)", 20, 21)]
    busy, idle, whole = charged(spans)
    assert busy == Counter(a=11, b=4)
    assert idle == Counter(a=6)
    assert whole == 21


def test_innermost_calls() -> None:
    calls = [("out", 0, 10), ("in", 2, 5), ("deep", 3, 4), ("in", 5, 6), ("after", 12, 13)]
    assert innermost(calls) == [
        ("out", 0, 2), ("in", 2, 3), ("deep", 3, 4), ("in", 4, 5), ("in", 5, 6), ("out", 6, 10),
        ("after", 12, 13),
    ]  # fmt: skip


@given(st.recursive(st.just([]), lambda kids: st.lists(kids, min_size=1, max_size=3), max_leaves=9))
def test_innermost_calls_cover_every_moment_once(tree: list[object]) -> None:
    calls: list[tuple[str, int, int]] = []

    def place(node: list[object], at: int) -> int:
        end = at + 1
        for child in node:
            end = place(child, end) + 1  # type: ignore[arg-type]
        calls.append(("x", at, end))
        return end

    end = place(tree, 0)
    spans = innermost(calls)
    assert sum(stop - start for _, start, stop in spans) == end
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_share_of_the_ceilings() -> None:
    from quire.tools.bench.work import Ceilings

    limits = Ceilings(1e12, 100e12, "measured")
    metrics = Profile("x", 2, [("a", 0, 1_000_000)], 8, 10e9, 0.2e9, limits).metrics()
    assert metrics["step_us"] == 500.0
    assert metrics["launches"] == 4.0
    assert metrics["mfu_percent"] == pytest.approx(10.0)
    assert metrics["bandwidth_percent"] == pytest.approx(20.0)
    assert metrics["a_us"] == 500.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), TINY)


def test_command(folder: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.json", tmp_path / "records.jsonl"
    done = CliRunner().invoke(
        app,
        [
            "profile", str(folder), "--device", "cpu", "--load-format", "dummy",
            "--skip-tokenizer-init", "--rows", "3", "--prompt-tokens", "20", "--steps", "4",
            "--trace", str(trace), "--output", str(file), "--json",
        ],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    (found,) = json.loads(done.stdout)
    assert found["case"] == "breakdown_3"
    (record,) = read_jsonl(file)
    assert record.settings["steps"] == 4
    assert 0 < record.metrics["idle_percent"] < 100
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    # Three prompts fit one step; 30 more come before the profile.
    assert {f"step {n}" for n in range(31, 35)} <= names
    assert "layer 2" in names
    assert "step 35" not in names


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_first_of_two_ranks(folder: Path, split: str) -> None:
    dummy: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, split: 2}
    llm = LLM(str(folder), device="cpu", **dummy)
    found = Profiler(llm, None).decode(2, 8, 3)
    llm.shutdown()
    assert found is not None
    assert found.steps == 3
    assert any("gloo" in name or "c10d" in name for name, _, _ in found.spans)


def test_case_and_refusals(folder: Path) -> None:
    from quire.tools.bench.cases import TTFT, parse_case

    llm = LLM(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True)
    profiler = Profiler(llm, None)
    found = profiler.case(parse_case("2x8x6"))
    assert found is not None
    assert found.steps == 6
    with pytest.raises(ConfigError, match="need sequences of"):
        profiler.decode(1, 200, 100)
    with pytest.raises(ConfigError, match="larger than max_num_seqs"):
        profiler.decode(65, 1, 1)
    with pytest.raises(ConfigError, match="1x2048x1"):
        profiler.case(TTFT)
    with pytest.raises(ConfigError, match="the device is a CPU"):
        Profiler(llm, None, nvtx=True)
    llm.shutdown()


def test_one_trace_holds_one_profile(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["profile", str(folder), "--rows", "1", "--rows", "2", "--trace", str(tmp_path / "t")]
    )
    assert isinstance(done.exception, ConfigError)
