"""The runs of the scaling bench, and their baselines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import scaling
from scaling import Run, runs, table


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_runs_fit_the_machine_and_have_a_model(gpus: int) -> None:
    found = list(runs(gpus))
    assert len({run.name for run in found}) == len(found)
    assert {run.tensor for run in found if run.model == "qwen3-8b" and run.pipeline == 1} == {
        size for size in (1, 2, 4, 8) if size <= gpus
    }
    assert all((scaling.HERE / "configs" / run.model / "config.json").exists() for run in found)


def test_commands() -> None:
    run = Run("qwen3-8b", 2, 2, experts=True, quantization="fp8", cases=("b64",))
    words = run.command(Path("out"), ["--device", "cpu"])
    assert words[3:5] == ["bench", "throughput"]
    assert words[-2:] == ["--device", "cpu"]
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--quantization"):
        assert flag in words
    assert words[words.index("--enable-expert-parallel") + 1] == "--quantization"
    assert Run("", start=True).command(Path("out"), [])[3:5] == ["bench", "startup"]


def test_lines_have_predictions_and_errors() -> None:
    run = Run("qwen3-8b", 4, cases=("b1-256", "ttft"))
    records = [
        {"case": "b1-256", "metrics": {"output_tok_s": 500.0, "total_tok_s": 1.0}},
        {"case": "ttft", "metrics": {"ttft_2048_ms": 20.0}},
    ]
    one, two = table(run, records, "NVIDIA H200")
    assert one.startswith("| qwen3-8b tp4 | b1-256 output_tok_s | 500.0 | 5")
    assert "ttft ttft_2048_ms | 20.0 | 20." in two
    assert table(run, records, "CPU")[0].endswith("| 500.0 |  |  |")


@pytest.mark.slow
def test_every_run_has_a_prediction() -> None:
    for run in runs(8):
        found = scaling.predictions(run, "NVIDIA H200")
        assert bool(found) == (run.pipeline == 1 and not run.start)


def test_gpus_are_given_in_turn() -> None:
    """A run that needs many GPUs is not overtaken by later ones that need few."""
    gpus, order = scaling.Gpus(2), []
    for turn in range(3):
        gpus.ask(turn)

    def go(turn: int, count: int) -> list[int]:
        with gpus.take(turn, count) as taken:
            order.append(turn)
            return taken

    with ThreadPoolExecutor(3) as threads, gpus.take(0, 1) as first:
        waiting = [threads.submit(go, 1, 2), threads.submit(go, 2, 1)]
        assert first == [0]
        assert not any(each.done() for each in waiting)
    assert [each.result() for each in waiting] == [[0, 1], [0]]
    assert order == [1, 2]
