"""The ladder's rungs as a table and a picture, and GPT-2's tables, out of the records of
`bench/ladder.py` and `bench/baselines/contiguous.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire.tools.bench import plots
from quire.tools.bench.record import BenchRecord, number, read_jsonl
from tables import RESULTS, table

_PREFIX = "ladder:"
PUBLISHED = {
    "KV cache": "2.2 × at 1000 tokens (GPT-2, A100)",
    "static batch": "118 × at batch 512 (GPT-2, A100)",
    "paged": "15 × one at a time at batch 8 (T4); 8.7 × less memory at batch 256, 9 × at 512; "
    "11.1 × one at a time with 64 users (GPT-2, A100)",
    "prefix cache": "2.56 × sooner to the first token (Qwen2.5-1.5B)",
    "speculation": "1.7 to 2.2 × on chat (Llama-7B)",
}
"""Figures that other small engines have published of a rung."""
_CASES = (
    (re.compile(r"cache:(\d+)\+(\d+)"), "one request, {} in, {} out", "ratio", "recomputing"),
    (re.compile(r"static:(\d+)"), "static batch of {}", "to_one", "one at a time"),
    (re.compile(r"users:(\d+)"), "{} users, Quire", "to_one", "one at a time"),
    (re.compile(r"users-(\d+):16"), "{} users, Quire", "to_one", "one at a time"),
)
"""GPT-2's cases: pattern, label, and the ratio with what it compares to."""
_SPEEDS = "cache_tok_s", "output_tok_s"


def load() -> list[BenchRecord]:
    """Returns the records of all machines."""
    files = sorted(RESULTS.glob("*_ladder.jsonl"))
    return [record for file in files for record in read_jsonl(file)]


def climbs(records: Sequence[BenchRecord]) -> dict[str, dict[str, float]]:
    """Returns each rung's output tokens a second as a multiple of the first rung's, by model,
    machine and load, then by rung. Of records of the same the latest counts."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        # Without the first rung there is no ratio to it.
        if record.case.startswith(_PREFIX) and "to_naive" in record.metrics:
            requests = record.settings.get("requests", "some")
            name = f"{record.model}, {record.card}, {requests} requests"
            rung = record.case.removeprefix(_PREFIX)
            found.setdefault(name, {})[rung] = record.metrics["to_naive"]
    return found


def order(found: dict[str, dict[str, float]]) -> list[str]:
    """Returns all rungs from the first to the last: some are skipped on some machines."""
    longest = sorted(found.values(), key=len, reverse=True)
    return list(dict.fromkeys(rung for own in longest for rung in own))


def rungs(records: Sequence[BenchRecord]) -> str:
    """Returns a row for each rung, and a column for each model and machine and for what others have
    published; "" without records."""
    found = climbs(records)
    rows = []
    for rung in order(found):
        ratios = [f"{number(own[rung])} ×" if rung in own else "–" for own in found.values()]
        rows.append([rung, *ratios, PUBLISHED.get(rung, "")])
    return table(["rung", *found, "published by others"], rows) if rows else ""


def gpt2(records: Sequence[BenchRecord]) -> str:
    """Returns a row for each comparison of `bench/ladder.py --tables`; "" without records."""
    found = {record.case: record for record in records if record.model == "gpt2"}
    rows = []
    for pattern, label, ratio, other in _CASES:
        for case, record in found.items():
            if match := pattern.fullmatch(case):
                metrics = record.metrics
                speed = next(metrics[name] for name in _SPEEDS if name in metrics)
                ratio_text = f"{number(metrics[ratio])} × {other}"
                graphs = "graphs" if record.settings.get("graphs") else "launch by launch"
                rows.append(
                    [
                        label.format(*match.groups()),
                        f"{speed:,.0f}",
                        ratio_text,
                        graphs,
                        record.card,
                    ]
                )
    return table(["", "tokens/s", "that is", "baseline", "card"], rows) if rows else ""


def load_tables() -> list[BenchRecord]:
    """Returns the records of `--tables` of all machines."""
    files = sorted(RESULTS.glob("*_ladder_tables.jsonl"))
    return [record for file in files for record in read_jsonl(file)]


def reserved(records: Sequence[BenchRecord]) -> str:
    """Returns a row for each batch of `bench/baselines/contiguous.py`; "" without records."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for record in records:
        if match := re.fullmatch(r"contiguous-(\d+)", record.case):
            found[record.card, int(match[1])] = record.metrics
    rows = []
    for (card, batch), metrics in sorted(found.items()):
        cells = [
            f"{metrics[f'{kind}_{name}']:{form}}"
            if f"{kind}_{name}" in metrics
            else "out of memory"
            for name, form in (("memory_gb", ".2f"), ("tok_s", ",.0f"))
            for kind in ("contiguous", "quire")
        ]
        ratio = metrics.get("memory_gb_ratio")
        rows.append([str(batch), *cells, "–" if ratio is None else f"{ratio:.2g} ×", card])
    header = ["batch", "reserved, GB", "blocks, GB", "reserved, tokens/s", "blocks, tokens/s"]
    return table([*header, "reserved ÷ blocks, memory", "card"], rows) if rows else ""


def load_reserved() -> list[BenchRecord]:
    files = sorted(RESULTS.glob("*_kv.jsonl"))
    return [record for file in files for record in read_jsonl(file)]


def plot(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws what each rung gains or loses, as bars from the rung before to the rung."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    found = climbs(records)
    names = order(found)
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(8, lines * (0.24 * len(names) + 1)), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for panel, (machine, own) in zip(panels, found.items(), strict=False):
        before = 1.0
        for name, after in own.items():
            row, gained = names.index(name), after >= before
            left, right = sorted((before, after))
            panel.barh(row, right - left, 0.7, left=left, color=plots.COLORS[0 if gained else 1])
            text = f" {after:.3g} ×" if name == next(iter(own)) else f" × {after / before:.2f}"
            panel.text(right, row, text, va="center", fontsize=8)
            before = after
        panel.set_title(machine.replace(", ", "\n", 1), fontsize=9)
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.margins(x=0.2)
        panel.set_xlabel("tokens per second, as a multiple of naive recompute", fontsize=8)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    plots.save(figure, path)
