"""Files of records: JSON lines as they come; CSV, Markdown and a picture at the end."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.bench.record import BenchRecord, append_jsonl, number
from quire.errors import ConfigError
from quire.extras import installing

Plot = Callable[[Sequence[BenchRecord], Path], None]


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files that were asked for; JSON lines are appended to, the others written anew."""

    jsonl: Path | None = None
    csv: Path | None = None
    markdown: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Before anything is measured: raises ConfigError for what could not be written after."""
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"--png needs matplotlib, which is not installed; {installing('plots')}", "png"
            )
        for path in (self.jsonl, self.csv, self.markdown, self.png):
            if path is None:
                continue
            if path.is_dir():
                raise ConfigError(f"cannot write {path}: it is a folder", "output")
            if not path.absolute().parent.is_dir():
                raise ConfigError(f"cannot write {path}: there is no such folder", "output")

    def add(self, record: BenchRecord) -> None:
        """A record as soon as it is there, so that nothing is lost if a later case fails."""
        if self.jsonl is not None:
            append_jsonl(self.jsonl, [record])

    def finish(self, records: Sequence[BenchRecord], plot: Plot, table: str | None = None) -> None:
        """table: the Markdown to write, where it is not simply a row per record."""
        if self.csv is not None:
            write_csv(self.csv, records)
        if self.markdown is not None:
            self.markdown.write_text(table or markdown(records), encoding="utf-8")
        if self.png is not None:
            plot(records, self.png)


def columns(records: Iterable[BenchRecord]) -> list[str]:
    """Every metric that any record has, in order of appearance."""
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def write_csv(path: Path, records: Sequence[BenchRecord]) -> None:
    """A row per record: what it is about, its metrics, its settings as JSON."""
    metrics = columns(records)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        about = ["case", "model", "card", "date", "commit"]
        writer.writerow([*about, *metrics, "versions", "settings"])
        for record in records:
            writer.writerow(
                [
                    *(getattr(record, name) for name in about),
                    *(record.metrics.get(name, "") for name in metrics),
                    msgspec.json.encode(record.versions).decode(),
                    msgspec.json.encode(record.settings).decode(),
                ]
            )


def markdown(records: Sequence[BenchRecord]) -> str:
    """A row per record and a column per metric, then where and when it was measured."""
    metrics = columns(records)
    rows = ["| " + " | ".join(["case", "model", *metrics]) + " |"]
    rows.append("| --- | --- |" + " ---: |" * len(metrics))
    for record in records:
        values = [number(record.metrics[m]) if m in record.metrics else "" for m in metrics]
        rows.append("| " + " | ".join([_cell(record.case), _cell(record.model), *values]) + " |")
    places = dict.fromkeys(
        ", ".join(
            [record.card, *(f"{name} {v}" for name, v in record.versions.items()), record.date[:10]]
        )
        for record in records
    )
    return "\n".join([*rows, "", *(_cell(place) + "." for place in places), ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
