"""The record of all benchmarks, and files of records."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError, installing


class BenchRecord(msgspec.Struct, kw_only=True):
    """One measurement.

    Attributes:
        case: the name of the workload.
        model: the model's name; "" for a case without a model.
        card: the device's name.
        versions: versions of Python, Quire, torch, Triton and NumPy.
        commit: the source tree's commit, with "+" if files had changed. It is "" outside of a tree.
        date: UTC, ISO 8601.
        metrics: numbers by name. The name contains the unit, as in `output_tok_s` and `ttft_ms`.
        settings: the settings that differ from the defaults.
    """

    case: str
    model: str = ""
    card: str = ""
    versions: dict[str, str] = {}
    commit: str = ""
    date: str = ""
    metrics: dict[str, float] = {}
    settings: dict[str, Any] = {}


def make_record(
    case: str,
    metrics: dict[str, float],
    *,
    model: str = "",
    device: str = "cpu",
    settings: dict[str, Any] | None = None,
) -> BenchRecord:
    """Returns a record of these metrics with the card, versions, commit and date filled in."""
    return BenchRecord(
        case=case,
        model=model,
        card=card_name(device),
        versions=versions(),
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics=metrics,
        settings=settings or {},
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("quire", "torch", "triton", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Returns the commit of the source tree that this file is in."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # An installed package may lie inside somebody else's repository.
    if not git("ls-files", "--", Path(__file__).name):
        return ""
    return git("rev-parse", "--short=12", "HEAD") + (
        "+" if git("status", "--porcelain", "--", str(here.parent)) else ""
    )


def card_name(device: str) -> str:
    if device.startswith("cuda"):
        # Imported here because clients of a server need no PyTorch.
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def append_jsonl(path: Path, records: Iterable[BenchRecord]) -> None:
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def read_jsonl(path: Path) -> list[BenchRecord]:
    """Reads records. Raises ConfigError, which names the first line that is not a record."""
    decoder = msgspec.json.Decoder(BenchRecord)
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                records.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    return records


def format_table(records: Sequence[BenchRecord], leave_out: Sequence[str] = ()) -> str:
    """Returns a plain table: a row per record, a column per metric of any record."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    metrics = [name for name in names if name not in leave_out]
    rows = [["case", "model", *metrics]]
    for record in records:
        values = [
            number(record.metrics[name]) if name in record.metrics else "" for name in metrics
        ]
        rows.append([record.case, record.model, *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def number(value: float) -> str:
    """Formats a number with three significant digits or one decimal, and whole numbers in full."""
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


# -- files of records: JSON lines at once, then CSV, Markdown and a picture at the end ----------

Plot = Callable[[Sequence[BenchRecord], Path], None]


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files for records. JSON lines are appended; the other files are overwritten."""

    jsonl: Path | None = None
    csv: Path | None = None
    markdown: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Raises ConfigError if a file could not be written, before anything is measured."""
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
        """Appends a record at once, so that it is not lost if a later case fails."""
        if self.jsonl is not None:
            append_jsonl(self.jsonl, [record])

    def finish(self, records: Sequence[BenchRecord], plot: Plot, table: str | None = None) -> None:
        """Writes the CSV, Markdown and picture files.

        Args:
            table: Markdown to write instead of a row per record.
        """
        if self.csv is not None:
            write_csv(self.csv, records)
        if self.markdown is not None:
            self.markdown.write_text(table or markdown(records), encoding="utf-8")
        if self.png is not None:
            plot(records, self.png)


def columns(records: Iterable[BenchRecord]) -> list[str]:
    """Returns the metrics of all records, in order of appearance."""
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def write_csv(path: Path, records: Sequence[BenchRecord]) -> None:
    """Writes a row per record: case, model and date, the metrics, the settings as JSON."""
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
    """Returns a row per record and a column per metric, then the card, versions and date."""
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
