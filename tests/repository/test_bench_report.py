"""The report's tables from records, and the parts of the GPU table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import gpu_table
import newest_report
import online_report
import report
import tables
from quire.models import load_config, spec_from_config
from quire.tools.bench.cases import parse_case
from quire.tools.bench.record import BenchRecord
from report import Book, Peer, make_book
from targets import CARD, TARGETS, Target, reach

ROOT = Path(__file__).resolve().parents[2]
PEERS = [
    Peer("A", "1", CARD, "setup a", {("qwen3-0.6b", "nano", "output_tok_s"): 20_000.0}),
    Peer(
        "B",
        "2",
        CARD,
        "setup b",
        {
            ("qwen3-0.6b", "nano", "output_tok_s"): 25_000.0,
            ("qwen3-0.6b", "ttft", "ttft_512_ms"): 8.0,
        },
    ),
]


def record(
    case: str,
    metrics: dict[str, float],
    settings: dict[str, object] | None = None,
    *,
    model: str = "Qwen3-0.6B",
    date: str = "2026-02-01T00:00:00+00:00",
    card: str = CARD,
) -> BenchRecord:
    return BenchRecord(
        case=case,
        model=model,
        card=card,
        versions={"torch": "2.11.0", "triton": "3.6.0"},
        commit="abc",
        date=date,
        metrics=metrics,
        settings=settings or {},
    )


def row(table: str, *start: str) -> list[str]:
    """Returns the cells of the only row with this beginning."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    (found,) = [cells for cells in rows if tuple(cells[: len(start)]) == start]
    return found


def book(*records: BenchRecord) -> Book:
    return make_book(records, PEERS)


def test_the_latest_plain_record_counts() -> None:
    later = "2026-03-01T00:00:00+00:00"
    made = book(
        record("nano", {"output_tok_s": 2.0}, date=later),
        record("nano", {"output_tok_s": 1.0}, model="qwen3-0.6b"),
        record("nano", {"output_tok_s": 3.0}, {"scale": 0.5}, date="2027"),
        record("nano", {"output_tok_s": 4.0}, {"max_num_seqs": 8}, date="2027"),
        record("nano", {"output_tok_s": 5.0}, {"engine": "vllm"}, date="2027"),
        record("nano", {"output_tok_s": 6.0}, card="another", date="2027"),
    )
    assert made.figure("Qwen3-0.6B", "nano", "output_tok_s") == 2.0
    assert made.figure("Qwen3-0.6B", "b1", "output_tok_s") is None


def test_cases_against_peers_and_targets() -> None:
    table = report.cases(
        book(
            record("nano", {"output_tok_s": 30_000.0}),
            record("ttft", {"ttft_512_ms": 4.0, "ttft_2048_ms": 7.0}),
            record("nano-penalized", {"output_tok_s": 27_000.0}),
            record("b1", {"output_tok_s": 196.0}, model="qwen3-8b"),
        )
    )
    assert row(table, "Qwen3-0.6B", "nano")[2:] == [
        *("25,000 (B)", "≥ 26,500 tok/s", "30,000", "1.20 ×", "reached (+13 %)", "~33,000"),
    ]
    assert row(table, "Qwen3-0.6B", "TTFT 512")[2:] == [
        *("8 (B)", "≤ 3 ms", "4", "2.00 ×", "-25 %", "~1"),
    ]
    assert row(table, "Qwen3-0.6B", "TTFT 2048")[6] == "reached (+0 %)"
    # Its target is a share of nano's figure, not of nano's target.
    assert row(table, "Qwen3-0.6B", "nano-penalized")[3:5] == ["≥ 28,500 tok/s", "27,000"]
    # A longer run stands in, and says so.
    assert row(table, "Qwen3-8B", "b1 (256 out)")[4] == "196 ¹"
    assert "¹ with 512 output tokens." in table
    assert row(table, "Llama-2-7B", "b64")[2:7] == ["–", "≥ 5,200 tok/s", "–", "–", "–"]
    assert f"{CARD}, torch 2.11.0, triton 3.6.0, 2026-02-01, commit abc." in table


def test_without_records() -> None:
    assert f"There are no records of {CARD} yet." in report.cases(book())
    for name in ("utilization", "breakdown", "ablation", "deterministic", "start"):
        assert report.TABLES[name](book()) == "Not measured yet.\n"


def test_other_engines_side_by_side() -> None:
    table = report.engines(book(record("nano", {"output_tok_s": 30_000.0})))
    header = ["model", "case", "A 1", "B 2", "Quire"]
    assert row(table, "model") == header
    assert row(table, "Qwen3-0.6B", "nano, tok/s")[2:] == ["20,000", "25,000", "30,000"]
    assert row(table, "Qwen3-0.6B", "TTFT 512, ms")[2:] == ["–", "8", "–"]
    assert "- B 2: setup b." in table


def test_utilization_and_start() -> None:
    metrics = {"output_tok_s": 1.0, "mean_batch": 63.94, "bandwidth_percent": 41.23}
    made = book(
        record("b64", {**metrics, "cpu_overhead_percent": 0.5}),
        record("breakdown_64", {"idle_percent": 1.5}),
        record("startup", {"first_token_s": 8.04, "import_s": 5.5}),
    )
    cells = row(report.utilization(made), "Qwen3-0.6B", "b64")
    assert cells[2:] == ["63.9", "41.2 %", "–", "–", "0.5 %", "–", "–", "1.5 %"]
    assert row(report.starts(made), "Qwen3-0.6B")[1:6] == [
        *("random", "warm", "8.0", "–", "5.5"),
    ]


def test_breakdown_names_the_longest_kernels() -> None:
    times = {f"_k{i}_us": float(i) for i in range(9)} | {"idle before _k1_us": 14.0}
    whole = {"step_us": 50.0, "idle_percent": 28.0, "launches": 9.0}
    cells = row(report.breakdown(book(record("breakdown_64", whole | times))), "Qwen3-0.6B")
    assert cells[1:3] == ["64", "50"]
    assert cells[3] == "`k8` 16 %, `k7` 14 %, `k6` 12 %, `k5` 10 %, `k4` 8 %, `k3` 6 %"
    assert cells[4] == "28.0 %"
    # A profile of the earlier kind is left out.
    del whole["launches"]
    made = book(record("breakdown_64", whole | times))
    assert report.breakdown(made) == "Not measured yet.\n"


def test_switches_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "IMAGES", tmp_path / "images")
    made = book(
        record("ablation:b1", {"output_tok_s": 9.0}, {"off": ""}, date="2026-01"),
        record("ablation:b1", {"output_tok_s": 10.0}, {"off": "", "scale": 1.0}),
        record("ablation:b1", {"output_tok_s": 4.0}, {"off": "pdl", "disable": ["pdl"]}),
    )
    table = report.switches(made)
    assert row(table, "b1") == ["b1", "10 tok/s", "4 (-60 %)"]
    assert "## Qwen3-0.6B, one thing off at a time" in table
    assert ".png" not in table
    pytest.importorskip("matplotlib")
    report.draw(made)
    assert "(../images/ablation-qwen3-0.6b.png)" in report.switches(made)


def test_cost_of_deterministic_results() -> None:
    made = book(
        record("b1", {"output_tok_s": 1000.0}),
        record("ttft", {"ttft_512_ms": 4.0}),
        record("b1", {"output_tok_s": 900.0}, {"deterministic": True, "scale": 1.0}),
        record("ttft", {"ttft_512_ms": 5.0}, {"deterministic": True}),
    )
    table = report.deterministic(made)
    assert row(table, "Qwen3-0.6B", "b1")[2:] == ["1,000 tok/s", "900 tok/s", "-10 %"]
    assert row(table, "Qwen3-0.6B", "TTFT 512")[2:] == ["4 ms", "5 ms", "-20 %"]
    assert made.figure("Qwen3-0.6B", "b1", "output_tok_s") == 1000.0


def test_another_dtype_fills_no_row() -> None:
    later = "2026-03-01T00:00:00+00:00"
    made = book(
        record("nano", {"output_tok_s": 1.0}, {"dtype": "bfloat16"}),
        record("nano", {"output_tok_s": 2.0}, {"dtype": "float16"}, date=later),
        record("b1", {"output_tok_s": 3.0}, model="a model of unknown dtype"),
    )
    assert made.figure("Qwen3-0.6B", "nano", "output_tok_s") == 1.0
    assert made.figure("a model of unknown dtype", "b1", "output_tok_s") is None


def test_only_text_between_markers_changes() -> None:
    page = "a\n<!-- start:begin -->\nold\n<!-- start:end -->\nb \\1\n"
    texts = {"start": "new \\1\n"}
    assert report.splice(page, texts) == page.replace("old\n", "new \\1\n")
    assert report.drift(page, texts) == ["start"]
    assert report.drift(report.splice(page, texts), texts) == []
    with pytest.raises(ValueError, match="marks places"):
        report.splice("nothing", texts)
    with pytest.raises(ValueError, match="found"):
        report.splice(page, {})


def test_committed_pages_match_the_records() -> None:
    texts = report.contents(make_book(report.load(), report.load_peers()))
    pages = [page.read_text() for page in report.PAGES]
    assert [name for page in pages for name in report.drift(page, texts)] == []
    assert sorted(name for page in pages for name in tables.marked(page)) == sorted(texts)


def test_percentiles_show_those_of_the_other_engine_too() -> None:
    metrics = {f"{kind}_p{p}_ms": float(p) for kind in ("ttft", "itl") for p in (50, 95, 99)}
    found = {("qwen3-8b", "serve-64"): record("serve-64", metrics, model="qwen3-8b")}
    made = online_report.percentiles(found, {("qwen3-8b", 64): {"ttft_p50_ms": 520.0}})
    assert row(made, "Qwen3-8B", "64")[2:] == [
        *("520 / – / –", "50 / 95 / 99", "– / – / –", "50 / 95 / 99"),
    ]


def test_targets_are_sound() -> None:
    keys = [(target.model, target.case, target.metric) for target in TARGETS]
    assert len(set(keys)) == len(keys)
    for target in TARGETS:
        if target.case != "startup":
            assert parse_case(target.case)
        if target.reach is not None and target.floor is not None:
            assert target.ratio(target.floor, target.reach) > 1
    assert reach("Qwen3-8B", "b1-256") == 258
    with pytest.raises(KeyError):
        reach("Qwen3-0.6B", "nano-penalized")


def test_units_and_ratios() -> None:
    wait = Target("m", "TTFT 512", "ttft", "ttft_512_ms", 3)
    rate = Target("m", "b1", "b1", "output_tok_s", 3)
    start = Target("m", "", "startup", "first_token_s", 3)
    assert [t.unit for t in (wait, rate, start)] == ["ms", "tok/s", "s"]
    assert (wait.ratio(2, 4), rate.ratio(2, 4), start.ratio(2, 4)) == (2, 0.5, 2)
    assert math.isclose(wait.ratio(3, 3), 1)


def test_parts_of_the_table() -> None:
    folder = ROOT / "bench" / "configs" / "qwen2.5-1.5b"
    cases, start, cold, switches, decided, profile = gpu_table.parts_of(folder)
    flags = cases.arguments
    given = [flags[i + 1] for i, word in enumerate(flags) if word == "--case"]
    assert given == [
        *("nano", "b64", "b1", "ttft", "64x64x16", "64x64x1024", "64x512x1024", "16x8192x128"),
    ]
    assert flags[:2] == ("throughput", str(folder))
    assert (start.name, cold.name) == ("qwen2.5-1.5b:start", "qwen2.5-1.5b:cold")
    assert switches.arguments.count("--case") == decided.arguments.count("--case") == 3
    assert "--deterministic" in decided.arguments
    assert (profile.file, profile.arguments[0]) == (gpu_table.PROFILE, str(folder))
    assert profile.arguments.count("--rows") == 2
    unknown = gpu_table.parts_of(Path("/x/some-model"))[0]
    assert [w for w in unknown.arguments if w in gpu_table.OTHERS] == list(gpu_table.OTHERS)
    with pytest.raises(SystemExit, match=r"no such part: zzz; there are qwen2.5-1.5b:cases"):
        gpu_table.chosen([cases], ["zzz"])
    assert gpu_table.slug("NVIDIA H200") == "h200"


@pytest.mark.parametrize("model", gpu_table.MODELS)
def test_committed_configs_are_the_models(model: str) -> None:
    spec = spec_from_config(load_config(ROOT / "bench" / "configs" / model))
    layers, hidden, vocab = {
        "qwen3-0.6b": (28, 1024, 151936),
        "qwen2.5-1.5b": (28, 1536, 151936),
        "qwen3-8b": (36, 4096, 151936),
        "llama-2-7b": (32, 4096, 32000),
    }[model]
    assert (len(spec.layers), spec.hidden_size, spec.vocab_size) == (layers, hidden, vocab)
    assert str(spec.dtype) == "torch.bfloat16"


def test_peers_file_names_versions_and_card() -> None:
    engines = json.loads((report.RESULTS / "peers.json").read_text())["engines"]
    assert [(e["name"], e["version"], e["card"]) for e in engines] == [
        ("vLLM", "0.26.0", CARD),
        ("SGLang", "0.5.16", CARD),
    ]


def test_engines_on_one_machine() -> None:
    figures = {
        "b1 (256 out)": {"A": 100.0, "B": 150.0, "Quire": 300.0},
        "TTFT 512": {"A": 6.0, "B": 12.0, "Quire": 3.0},
        "nano": {"Quire": 9.0},
    }
    machine = {
        "card": "NVIDIA H200",
        "date": "2026-02-01",
        "versions": {"A": "1", "B": "2", "Quire": "abc"},
        "setup": "one after the other",
        "models": {"m": figures},
    }
    whole = newest_report.machines([machine])
    assert row(whole, "m", "b1 (256 out)")[2:] == ["100", "150", "300", "2.00 ×"]
    assert row(whole, "m", "TTFT 512")[2:] == ["6", "12", "3", "2.00 ×"]
    assert row(whole, "m", "nano")[2:] == ["–", "–", "9", "–"]
    short = row(newest_report.newest([machine]), "H200", "m")
    assert short[2:] == ["–", "–", "300 (2.00 ×)", "3 (2.00 ×)", "–", "–", "–"]
