"""Tables of the serving speed, out of `bench/results/h200_online.jsonl`, for `report.py`.

Rows are the latest records of one configuration of the server. The other engine's figures are in
`bench/results/peers_online.json`.
"""

from __future__ import annotations

import json

from online import TARGETS
from quire.tools.bench.record import BenchRecord, read_jsonl
from tables import RESULTS, table

FLAGS = "--api-workers 4 --max-num-batched-tokens 4096"
NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}
METRICS = ("output_tok_s", "ttft_p50_ms", "itl_p95_ms")

PERCENTILES = (50, 95, 99)

Latest = dict[tuple[str, str], BenchRecord]
Peers = dict[tuple[str, int], dict[str, float]]
"""Another engine's metrics by model and streams."""


def load() -> Latest:
    return latest(read_jsonl(RESULTS / "h200_online.jsonl"))


def load_peers() -> Peers:
    models = json.loads((RESULTS / "peers_online.json").read_text())["models"]
    return {
        (model, int(streams)): metrics
        for model, levels in models.items()
        for streams, metrics in levels.items()
    }


def latest(records: list[BenchRecord]) -> Latest:
    """By model and case."""
    found: Latest = {}
    for record in sorted(records, key=lambda record: record.date):
        if record.settings.get("flags") == FLAGS:
            found[record.model, record.case] = record
    return found


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cell(figure: float, reach: float, higher: bool) -> str:
    missed = figure < reach if higher else figure > reach
    text = _figure(figure)
    return f"{text} (not {'≥' if higher else '≤'} {reach:,g})" if missed else text


def online(found: Latest, peers: Peers) -> str:
    rows = []
    for model, levels in TARGETS.items():
        for streams, reach in levels.items():
            record = found.get((model, f"serve-{streams}"))
            if record is None:
                continue
            peer = [peers[model, streams][metric] for metric in METRICS]
            cells = [
                _cell(record.metrics[metric], limit, metric == "output_tok_s")
                for metric, limit in zip(METRICS, reach, strict=True)
            ]
            pairs = [
                f"{_figure(theirs)} → {ours}" for theirs, ours in zip(peer, cells, strict=True)
            ]
            share = record.metrics.get("of_offline")
            rows.append([NAMES[model], str(streams), *pairs, f"{share:.1%}" if share else "–"])
    header = ("model", "streams", "tok/s", "TTFT p50, ms", "ITL p95, ms", "of offline")
    return table(header, rows)


def percentiles(found: Latest, peers: Peers) -> str:
    """Time to first token and between tokens: p50, p95 and p99, the other engine's before ours."""
    rows = []
    for model, levels in TARGETS.items():
        for streams in levels:
            record = found.get((model, f"serve-{streams}"))
            if record is None:
                continue
            cells = []
            for kind in ("ttft", "itl"):
                names = [f"{kind}_p{percent}_ms" for percent in PERCENTILES]
                for metrics in (peers[model, streams], record.metrics):
                    cells.append(" / ".join(_figure(metrics.get(name)) for name in names))
            rows.append([NAMES[model], str(streams), *cells])
    header = ("model", "streams", "TTFT, vLLM", "TTFT, Quire", "ITL, vLLM", "ITL, Quire")
    return table(header, rows)


def users(found: Latest) -> str:
    rows = []
    for (_, case), record in found.items():
        if case.startswith("users-"):
            m = record.metrics
            rows.append([case.removeprefix("users-"), f"{m['output_tok_s']:,.0f}",
                         f"{m['speedup']:.1f} ×", f"{m['ttft_p50_ms']:.1f}",
                         f"{m['itl_p95_ms']:.2f}"])  # fmt: skip
    rows.sort(key=lambda row: int(row[0]))
    return table(("users", "tok/s", "to one at a time", "TTFT p50, ms", "ITL p95, ms"), rows)
