"""Places of records, parts of a start and of a switch, and every bench command on a CPU."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config import OPTIMIZATIONS, EngineArgs
from quire.errors import ConfigError, QuireError
from quire.tools.bench import ablation, plots, startup
from quire.tools.bench import record as outputs
from quire.tools.bench.record import BenchRecord, OutputFiles, read_jsonl


def record(case: str, settings: dict[str, object] | None = None, **metrics: float) -> BenchRecord:
    return BenchRecord(
        case=case,
        model="m",
        card="c",
        versions={"quire": "1"},
        date="2026-01-02T03:04:05+00:00",
        metrics=metrics,
        settings=settings or {},
    )


ABLATION = [
    record("ablation:b1", {"off": ""}, output_tok_s=200.0, seconds=1),
    record("ablation:ttft", {"off": ""}, ttft_512_ms=3.0),
    record("ablation:b1", {"off": "graphs"}, output_tok_s=50.0, seconds=4),
    record("ablation:ttft", {"off": "graphs"}, ttft_512_ms=12.0),
    record("ablation:b1", {"off": "pdl"}, output_tok_s=180.0, seconds=1.1),
    record("b1", output_tok_s=1.0),
]


def test_csv_and_markdown(tmp_path: Path) -> None:
    records = [record("a|b", {"x": 1}, output_tok_s=1.5), record("ttft", ttft_512_ms=2)]
    out = OutputFiles(tmp_path / "o.jsonl", tmp_path / "o.csv", tmp_path / "o.md")
    out.check()
    for one in records:
        out.add(one)
    out.finish(records, lambda *_: None)
    assert read_jsonl(tmp_path / "o.jsonl") == records
    rows = list(csv.DictReader((tmp_path / "o.csv").open()))
    assert [row["case"] for row in rows] == ["a|b", "ttft"]
    assert (rows[0]["output_tok_s"], rows[0]["ttft_512_ms"]) == ("1.5", "")
    assert json.loads(rows[0]["settings"]) == {"x": 1}
    lines = (tmp_path / "o.md").read_text().splitlines()
    assert lines[0] == "| case | model | output_tok_s | ttft_512_ms |"
    assert lines[2] == "| a\\|b | m | 1.5 |  |"
    assert lines[-1] == "c, quire 1, 2026-01-02."


def test_unwritable_outputs_are_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        OutputFiles(csv=tmp_path).check()
    with pytest.raises(ConfigError, match="no such folder"):
        OutputFiles(jsonl=tmp_path / "x" / "y.jsonl").check()
    monkeypatch.setattr(outputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--png needs matplotlib.*\[plots\]"):
        OutputFiles(png=tmp_path / "x.png").check()


def test_ablation_table() -> None:
    lines = ablation.lines(ABLATION)
    assert [(line.label, line.unit, line.on) for line in lines] == [
        ("b1", "tok/s", 200.0),
        ("TTFT 512", "ms", 3.0),
    ]
    assert lines[0].speed("graphs") == 0.25
    assert lines[1].speed("graphs") == 0.25
    table = ablation.markdown(lines).splitlines()
    assert table[0] == "| case | everything on | without graphs | without pdl |"
    assert table[2] == "| b1 | 200 tok/s | 50 (-75 %) | 180 (-10 %) |"
    assert table[3] == "| TTFT 512 | 3.00 ms | 12.00 (-75 %) |  |"


def test_switches_become_settings() -> None:
    for name in OPTIMIZATIONS:
        assert EngineArgs(**ablation.without({"seed": 3}, name)) == EngineArgs(
            seed=3, disable=(name,)
        )
    assert ablation.without({"disable": ("pdl",)}, "graphs")["disable"] == ("pdl", "graphs")
    assert ablation.switches_of(2) == OPTIMIZATIONS
    assert ablation.switches_of(1) == ("graphs", "overlap", "fusions", "skinny", "pdl")
    with pytest.raises(ConfigError, match=r"unknown switch 'x'; expected one of: graphs, overlap"):
        ablation.without({}, "x")


def test_phases_of_a_start_add_up() -> None:
    moments = {
        "started": 10.5,
        "imported": 12.5,
        "built": 20.5,
        "seconds": {"weights": 3.0, "graphs": 4.0},
        "device": "cuda",
    }
    found = startup.phases(moments, 10.0, 21.0)
    assert found["first_token_s"] == 11.0
    assert {name: found[name] for name in startup.PHASES} == {
        "python_s": 0.5,
        "import_s": 2.0,
        "weights_s": 3.0,
        "capture_s": 4.0,
        "rest_s": 1.0,
        "generate_s": 0.5,
    }


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = [
        record(f"{n}x1x1", {"sweep": "rows", "rows": n}, output_tok_s=float(n)) for n in (1, 2, 4)
    ]
    several = [*sweep, record("b1", output_tok_s=2.0), record("ttft", ttft_512_ms=1.0)]
    plots.throughput(several, tmp_path / "1.png")
    plots.latency([record("latency-1x1", ttft_p50_ms=1, e2e_p50_ms=2)], tmp_path / "2.png")
    plots.phases([record("startup", import_s=1, weights_s=2)], tmp_path / "3.png")
    plots.switches(ABLATION, tmp_path / "4.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "quire", "bench", *arguments, "--num-kv-blocks", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_throughput_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl"
    shown = bench(
        *("throughput", "--case", "b1", "--case", "ttft", "--case", "nano-penalized"),
        *("--batch-sweep", "1,3", "--sweep-input-len", "100", "--sweep-output-len", "16"),
        *("--scale", "0.05", "--repeat", "1", "--output", str(file)),
    )
    records = {r.case: r for r in read_jsonl(file)}
    assert list(records) == ["b1", "ttft", "nano-penalized", "1x100x16", "3x100x16"]
    assert all(case in shown for case in records)
    b1, nano = records["b1"], records["nano-penalized"]
    assert b1.model == "quire-tiny"
    assert (b1.metrics["prompt_tokens"], b1.metrics["output_tokens"]) == (6, 26)
    # One step for the prompt and its token, one for each other token.
    assert (b1.metrics["steps"], b1.metrics["mean_batch"]) == (26, 1)
    assert 1 < nano.metrics["mean_batch"] <= 13
    assert nano.metrics["kv_utilization_reserved_percent"] > 0
    assert nano.metrics["kv_utilization_reserved_percent"] < nano.metrics["kv_utilization_percent"]
    assert nano.metrics["kv_utilization_percent"] <= 100
    assert set(records["ttft"].metrics) == {"ttft_26_ms", "ttft_102_ms", "ttft_410_ms"}
    assert records["3x100x16"].settings["sweep"] == "rows"


def test_latency_and_ablation_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl"
    lengths = ("--input-len", "8,16", "--output-len", "1,4")
    bench("latency", *lengths, "--requests", "2", "--output", str(file))
    cases = {r.case: r.metrics for r in read_jsonl(file)}
    assert list(cases) == ["latency-8x1", "latency-8x4", "latency-16x1", "latency-16x4"]
    assert "itl_p50_ms" not in cases["latency-8x1"]
    assert cases["latency-8x4"]["itl_p99_ms"] >= cases["latency-8x4"]["itl_p50_ms"] > 0
    table = tmp_path / "t.md"
    small = ("--case", "4x8x4", "--repeat", "1", "--off", "overlap", "--markdown", str(table))
    assert "without overlap" in bench("ablation", *small)
    assert table.read_text().splitlines()[2].startswith("| 4x8x4 |")


def test_startup_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl"
    bench("startup", "--cold", "--repeat", "1", "--output", str(file))
    (found,) = read_jsonl(file)
    assert found.case == "startup-files-cold"
    total = found.metrics["first_token_s"]
    assert total == pytest.approx(sum(found.metrics[name] for name in startup.PHASES))


def test_a_start_that_fails_says_why() -> None:
    command = startup.command({"max_model_len": 99999999})
    with pytest.raises(ConfigError, match="max_model_len=99999999 is more than"):
        startup.measure(command, cold=True, repeat=1, timeout=120)


def test_a_start_that_takes_too_long_is_ended() -> None:
    command = [sys.executable, "-c", "import time; print('{', flush=True); time.sleep(600)"]
    with pytest.raises(QuireError, match="no token within 1 seconds"):
        startup.measure(command, cold=True, repeat=1, timeout=1)


def test_names_of_starts() -> None:
    assert startup.case_name("dummy", cold=False) == "startup"
    assert startup.case_name("auto", cold=True) == "startup-files-cold"
