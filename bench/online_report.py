"""Tables of the serving speed, out of `bench/results/h200_online.jsonl`.

    python bench/online_report.py                              # print them
    python bench/online_report.py --write docs/performance.md  # between <!-- online:begin --> marks

All rows are of one configuration of the server, the latest record of each.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from online import TARGETS
from quire.bench.record import BenchRecord, read_jsonl
from report import RESULTS, table

FLAGS = "--api-workers 4 --max-num-batched-tokens 4096"
NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}
VLLM = {
    ("qwen3-0.6b", 4): (1628, 44, 2.6), ("qwen3-0.6b", 64): (15_045, 144, 9.6),
    ("qwen3-0.6b", 256): (28_434, 371, 29.0), ("qwen3-8b", 4): (718, 62, 5.7),
    ("qwen3-8b", 64): (6151, 520, 8.2),
}  # fmt: skip
"""vLLM 0.26 on the same card, by a client of four processes from 64 streams up."""
METRICS = ("output_tok_s", "ttft_p50_ms", "itl_p95_ms")

Latest = dict[tuple[str, str], BenchRecord]


def latest(records: list[BenchRecord]) -> Latest:
    """By model and case."""
    found: Latest = {}
    for record in sorted(records, key=lambda record: record.date):
        if record.settings.get("flags") == FLAGS:
            found[record.model, record.case] = record
    return found


def _cell(figure: float, reach: float, higher: bool) -> str:
    missed = figure < reach if higher else figure > reach
    text = f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
    return f"{text} (not {'≥' if higher else '≤'} {reach:,g})" if missed else text


def online(found: Latest) -> str:
    rows = []
    for model, levels in TARGETS.items():
        for streams, reach in levels.items():
            record = found.get((model, f"serve-{streams}"))
            if record is None:
                continue
            peer = VLLM[model, streams]
            cells = [
                _cell(record.metrics[metric], limit, metric == "output_tok_s")
                for metric, limit in zip(METRICS, reach, strict=True)
            ]
            pairs = [f"{theirs:,g} → {ours}" for theirs, ours in zip(peer, cells, strict=True)]
            share = record.metrics.get("of_offline")
            rows.append([NAMES[model], str(streams), *pairs, f"{share:.1%}" if share else "–"])
    header = ("model", "streams", "tok/s", "TTFT p50, ms", "ITL p95, ms", "of offline")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page with markers")
    args = parser.parse_args()
    found = latest(read_jsonl(RESULTS / "h200_online.jsonl"))
    tables = {"online": online(found), "users": users(found)}
    if args.write is None:
        print("\n".join(tables.values()))
        return
    page = args.write.read_text()
    for name, text in tables.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        page = pattern.sub(lambda _: begin + text + end, page)  # noqa: B023
    args.write.write_text(page)


if __name__ == "__main__":
    main()
