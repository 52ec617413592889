"""Tables of the pages, out of the records in `bench/results`.

    python bench/report.py            # print all tables
    python bench/report.py --check    # fail where a page's table differs from the records
    python bench/report.py --write    # renew the tables of all pages
    python bench/report.py --plots    # draw the pictures of docs/images (matplotlib)

A page marks the place of a table by `<!-- NAME:begin -->` and `<!-- NAME:end -->`; `contents` has
the names. Of each case, model and card the latest record counts, if it was made at full size, in
bfloat16, with the engine's own settings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ladder_report
import memory_report
import newest_report
import online_report
from quire.tools.bench import ablation, plots, startup
from quire.tools.bench.record import BenchRecord, read_jsonl
from tables import DTYPE, PLAIN, RESULTS, content, dtype_of, marked, replace, table
from targets import CARD, TARGETS, Target

ROOT = RESULTS.parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "WRITEUP.md",
    ROOT / "docs" / "deploy.md",
    ROOT / "docs" / "performance.md",
    *(
        ROOT / "docs" / "performance" / f"{name}.md"
        for name in ("cases", "serving", "optimizations", "deterministic", "start")
    ),
    ROOT / "bench" / "vs_vllm.md",
)
"""Pages with marked tables."""
IMAGES = ROOT / "docs" / "images"


@dataclass(frozen=True)
class Peer:
    """Another engine's figures: (model, case, metric) to value; model in small letters."""

    name: str
    version: str
    card: str
    setup: str
    figures: dict[tuple[str, str, str], float]


@dataclass(frozen=True)
class Book:
    """The records of one card.

    Attributes:
        latest: record by (model in small letters, case).
        switches: records of the latest ablations, by model.
        deterministic: like `latest`, with `--deterministic`.
    """

    card: str
    latest: dict[tuple[str, str], BenchRecord]
    switches: dict[str, list[BenchRecord]] = field(default_factory=dict)
    peers: Sequence[Peer] = ()
    deterministic: dict[tuple[str, str], BenchRecord] = field(default_factory=dict)

    def figure(self, model: str, case: str, metric: str) -> float | None:
        record = self.latest.get((model.lower(), case))
        return None if record is None else record.metrics.get(metric)

    def ours(self, target: Target) -> tuple[float | None, str]:
        """(the figure, a mark if it comes from a longer run than the target's)."""
        found = self.figure(target.model, target.case, target.metric)
        if found is None and target.case == "b1-256":
            found = self.figure(target.model, "b1", target.metric)
            return found, "" if found is None else " ¹"
        return found, ""

    def reach(self, target: Target) -> float | None:
        if target.reach is not None:
            return target.reach
        base = self.figure(target.model, target.share_of, target.metric)
        return None if base is None else target.share * base

    def peer(self, target: Target) -> tuple[Peer, float] | None:
        """The best of the others."""
        key = (target.model.lower(), target.case, target.metric)
        known = [(peer, peer.figures[key]) for peer in self.peers if key in peer.figures]
        return max(known, key=lambda one: target.ratio(one[1], 1.0), default=None)


def make_book(records: Iterable[BenchRecord], peers: Sequence[Peer], card: str = CARD) -> Book:
    latest: dict[tuple[str, str], BenchRecord] = {}
    off: dict[tuple[str, str, str], BenchRecord] = {}
    deterministic: dict[tuple[str, str], BenchRecord] = {}
    for record in sorted(records, key=lambda record: record.date):
        settings, model = record.settings, record.model.lower()
        if record.card != card or settings.get("scale", 1.0) != 1.0 or "engine" in settings:
            continue
        if dtype_of(record.model, settings) != DTYPE:
            continue
        if record.case.startswith(ablation.PREFIX):
            off[model, record.case, settings["off"]] = record
        elif set(settings) <= PLAIN:
            latest[model, record.case] = record
        elif set(settings) - PLAIN == {"deterministic"}:
            deterministic[model, record.case] = record
    switches: dict[str, list[BenchRecord]] = {}
    for (model, _, _), record in off.items():
        switches.setdefault(model, []).append(record)
    return Book(card, latest, switches, peers, deterministic)


def load(folder: Path = RESULTS) -> list[BenchRecord]:
    return [record for file in sorted(folder.glob("*.jsonl")) for record in read_jsonl(file)]


def load_peers(path: Path = RESULTS / "peers.json") -> list[Peer]:
    return [
        Peer(
            engine["name"],
            engine["version"],
            engine["card"],
            engine["setup"],
            {
                (model.lower(), case, metric): value
                for model, cases in engine["models"].items()
                for case, metrics in cases.items()
                for metric, value in metrics.items()
            },
        )
        for engine in json.loads(path.read_text())["engines"]
    ]


# -- tables ------------------------------------------------------------------------------------


def shown(value: float | None, target: Target) -> str:
    if value is None:
        return "–"
    if target.higher:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def cases(book: Book) -> str:
    """Returns each target with the figures of the best other engine and of Quire."""
    rows, marked = [], False
    for target in TARGETS:
        (figure, mark), reach, peer = book.ours(target), book.reach(target), book.peer(target)
        marked = marked or bool(mark)
        sign = "≥" if target.higher else "≤"
        rows.append(
            [
                target.model,
                target.label,
                "–" if peer is None else f"{shown(peer[1], target)} ({peer[0].name})",
                "–" if reach is None else f"{sign} {shown(reach, target)} {target.unit}",
                shown(figure, target) + mark,
                "–" if figure is None or peer is None else f"{target.ratio(figure, peer[1]):.2f} ×",
                verdict(target, figure, reach),
                "–" if target.floor is None else f"~{shown(target.floor, target)}",
            ]
        )
    header = (
        "model",
        "case",
        "best peer",
        "target",
        "Quire",
        "to peer",
        "to target",
        "floor",
    )
    text = table(header, rows)
    return text + ("\n¹ with 512 output tokens.\n" if marked else "") + sources(book)


def verdict(target: Target, figure: float | None, reach: float | None) -> str:
    if figure is None or reach is None:
        return "–"
    ratio = target.ratio(figure, reach)
    return f"reached ({100 * (ratio - 1):+.0f} %)" if ratio >= 1 else f"{100 * (ratio - 1):+.0f} %"


def sources(book: Book) -> str:
    """Names the records that the figures come from."""
    used = [
        record
        for target in TARGETS
        for case in (target.case, "b1")
        if (record := book.latest.get((target.model.lower(), case)))
    ]
    if not used:
        return f"\nThere are no records of {book.card} yet.\n"
    days = sorted({record.date[:10] for record in used})
    commits = sorted({record.commit for record in used if record.commit})
    versions = used[-1].versions
    about = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"\n{book.card}, {about}, {when}, commit {', '.join(commits)}.\n"


def engines(book: Book) -> str:
    """Every figure that another engine has, beside ours."""
    rows = []
    for target in TARGETS:
        key = (target.model.lower(), target.case, target.metric)
        theirs = [peer.figures.get(key) for peer in book.peers]
        figure, mark = book.ours(target)
        if any(value is not None for value in theirs):
            label = f"{target.label}, {target.unit}"
            others = [shown(value, target) for value in theirs]
            rows.append([target.model, label, *others, shown(figure, target) + mark])
    header = ["model", "case", *(f"{peer.name} {peer.version}" for peer in book.peers), "Quire"]
    notes = [f"{peer.name} {peer.version}: {peer.setup}." for peer in book.peers]
    if any(row[-1].endswith("¹") for row in rows):
        notes.append("¹ with 512 output tokens.")
    return table(header, rows) + "\n" + "\n".join(f"- {note}" for note in notes) + "\n"


_PROFILES = {"b1": "breakdown_1", "b1-256": "breakdown_1", "b64": "breakdown_64"}
_KERNELS = 6
"""Kernels of a profile that are shown."""
_UTILIZATION = {
    "mean_batch": "mean batch",
    "bandwidth_percent": "bandwidth",
    "mfu_percent": "MFU",
    "bound_percent": "of the bound",
    "cpu_overhead_percent": "CPU overhead",
    "kv_utilization_percent": "KV utilization",
    "kv_utilization_reserved_percent": "KV, room for the longest",
}


def utilization(book: Book) -> str:
    """Returns the share of the card that each case uses. Profiles add the idle time."""
    rows = []
    for target in TARGETS:
        model = target.model.lower()
        record = book.latest.get((model, target.case))
        profile = book.latest.get((model, _PROFILES.get(target.case, "")))
        if target.metric != "output_tok_s" or (record is None and profile is None):
            continue
        metrics = {} if record is None else record.metrics
        idle = None if profile is None else profile.metrics.get("idle_percent")
        if idle is None and not set(metrics) & set(_UTILIZATION):
            continue
        cells = [percent(metrics.get(name), name) for name in _UTILIZATION]
        rows.append([target.model, target.label, *cells, percent(idle, "idle_percent")])
    header = ["model", "case", *_UTILIZATION.values(), "idle between kernels (profile)"]
    return table(header, rows) if rows else "Not measured yet.\n"


def breakdown(book: Book) -> str:
    """A decode step's device time, the kernels that take most of it first."""
    rows = []
    for model in dict.fromkeys(target.model for target in TARGETS):
        for case in dict.fromkeys(_PROFILES.values()):
            record = book.latest.get((model.lower(), case))
            # Earlier profiles, without `launches`, charged kernels for waiting inside.
            if record is None or "launches" not in record.metrics:
                continue
            step = record.metrics["step_us"]
            shares = {
                name.removesuffix("_us").strip(" _"): 100.0 * us / step
                for name, us in record.metrics.items()
                if name.endswith("_us") and name != "step_us" and not name.startswith("idle ")
            }
            longest = sorted(shares.items(), key=lambda item: -item[1])[:_KERNELS]
            named = [f"`{name}` {share:.0f} %" for name, share in longest if share >= 1.0]
            idle = percent(record.metrics["idle_percent"], "idle_percent")
            count = case.removeprefix("breakdown_")
            rows.append([model, count, f"{step:,.0f}", ", ".join(named), idle])
    header = ("model", "rows", "step, µs", "kernels", "idle")
    return table(header, rows) if rows else "Not measured yet.\n"


def percent(value: float | None, name: str) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} %" if name.endswith("percent") else f"{value:.1f}"


def switches(book: Book) -> str:
    """Each model's cases with one optimization off at a time."""
    parts = []
    for model, records in book.switches.items():
        lines = ablation.lines(records)
        if not lines:
            continue
        name = next((t.model for t in TARGETS if t.model.lower() == model), model)
        parts.append(f"## {name}, one thing off at a time\n\n{ablation.markdown(lines)}")
        if (IMAGES / picture(model)).exists():
            parts.append(f"![Speed without each optimization](../{IMAGES.name}/{picture(model)})\n")
    return "\n".join(parts) or "Not measured yet.\n"


def picture(model: str) -> str:
    return f"ablation-{model}.png"


def deterministic(book: Book) -> str:
    """Returns the cost of bit-identical results, for each case with both records."""
    rows = []
    for target in TARGETS:
        record = book.deterministic.get((target.model.lower(), target.case))
        plain = book.figure(target.model, target.case, target.metric)
        figure = None if record is None else record.metrics.get(target.metric)
        if figure is None or plain is None:
            continue
        both = [f"{shown(value, target)} {target.unit}" for value in (plain, figure)]
        cost = f"{100 * (target.ratio(figure, plain) - 1):+.0f} %"
        rows.append([target.model, target.label, *both, cost])
    header = ("model", "case", "plain", "deterministic", "speed")
    return table(header, rows) if rows else "Not measured yet.\n"


def starts(book: Book) -> str:
    """Seconds from the command to the first token, and where they go."""
    rows = []
    for model in dict.fromkeys(target.model for target in TARGETS):
        for load_format, cold in itertools.product(("dummy", "auto"), (False, True)):
            case = startup.case_name(load_format, cold=cold)
            record = book.latest.get((model.lower(), case))
            if record is not None:
                values = [record.metrics.get(m) for m in ("first_token_s", *startup.PHASES)]
                cells = ["–" if value is None else f"{value:.1f}" for value in values]
                weights = "random" if load_format == "dummy" else "files"
                rows.append([model, weights, "empty" if cold else "warm", *cells])
    header = ["model", "weights", "kernel cache", "first token, s"]
    header += [phase.removesuffix("_s") for phase in startup.PHASES]
    return table(header, rows) if rows else "Not measured yet.\n"


TABLES = {
    "cases": cases,
    "engines": engines,
    "utilization": utilization,
    "breakdown": breakdown,
    "ablation": switches,
    "deterministic": deterministic,
    "start": starts,
}


# -- pages -------------------------------------------------------------------------------------


def contents(book: Book) -> dict[str, str]:
    """Returns the text of every place that a page may mark."""
    found, peers = online_report.load(), online_report.load_peers()
    machines = newest_report.load()
    return {
        **{name: make(book) for name, make in TABLES.items()},
        "summary": newest_report.summary(machines),
        "newest": newest_report.newest(machines),
        "machines": newest_report.machines(machines),
        "memory": memory_report.memory(),
        "online": online_report.online(found, peers),
        "percentiles": online_report.percentiles(found, peers),
        "users": online_report.users(found),
        "ladder": ladder_report.rungs(ladder_report.load()),
        "gpt2": ladder_report.gpt2(ladder_report.load_tables()),
        "reserved": ladder_report.reserved(ladder_report.load_reserved()),
    }


def splice(page: str, texts: Mapping[str, str]) -> str:
    """Returns the page with each marked table renewed.

    Raises:
        ValueError: the page marks no place, or one that nothing fills.
    """
    names = marked(page)
    if not names or not set(names) <= set(texts):
        raise ValueError(f"a page marks places for some of: {', '.join(texts)}; found {names}")
    for name in names:
        page = replace(page, name, texts[name])
    return page


def drift(page: str, texts: Mapping[str, str]) -> list[str]:
    """Returns the names of the page's tables that are not what the records say."""
    return [name for name in marked(page) if content(page, name) != texts.get(name)]


def draw(book: Book) -> None:
    """Draws the pictures that the README and `switches` refer to."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    served = [
        (f"{online_report.NAMES[model]}\n{streams} streams", theirs, record.metrics)
        for (model, streams), theirs in online_report.load_peers().items()
        if (record := online_report.load().get((model, f"serve-{streams}")))
    ]
    plots.beside(served, ("vLLM 0.26.0", "Quire"), IMAGES / "serving.png")
    ladder_report.plot(ladder_report.load(), IMAGES / "ladder.png")
    for model, records in book.switches.items():
        if ablation.lines(records):
            plots.switches(records, IMAGES / picture(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare the pages with the records")
    parser.add_argument("--write", action="store_true", help="renew the pages")
    parser.add_argument("--plots", action="store_true", help="draw the pictures of docs/images")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder of *.jsonl")
    parser.add_argument("--card", default=CARD)
    options = parser.parse_args()
    book = make_book(load(options.results), load_peers(), options.card)
    texts = contents(book)
    if options.plots:
        draw(book)
    if options.write:
        for path in PAGES:
            path.write_text(splice(path.read_text(), texts))
    if options.check:
        wrong = [f"{p.name}: {name}" for p in PAGES for name in drift(p.read_text(), texts)]
        if wrong:
            sys.exit(
                "tables that differ from the records (python bench/report.py --write renews "
                f"them): {'; '.join(wrong)}"
            )
    if not (options.plots or options.write or options.check):
        print("\n".join(texts.values()))


if __name__ == "__main__":
    main()
