"""Shared parts of scripts and reports: records, Markdown tables, marked places of pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.tools.bench.record import BenchRecord, append_jsonl, format_table

RESULTS = Path(__file__).resolve().parent / "results"
CONFIGS = RESULTS.parent / "configs"
DTYPE = "bfloat16"
"""dtype of all rows. Records of another dtype are ignored."""


PLAIN = {
    "model", "load_format", "skip_tokenizer_init", "enable_prefix_caching", "scale", "repeat",
    "dtype", "ceilings", "sweep", "rows", "input_len",
}  # fmt: skip
"""Settings that a record of the engine's defaults may have."""


def dtype_of(model: str, settings: Mapping[str, Any]) -> str | None:
    """Returns the dtype of a record; None where it is not known.

    Early records name none: they ran in the dtype of the committed configuration.
    """
    named: str | None = settings.get("dtype")
    if named is not None:
        return named
    file = CONFIGS / model.lower() / "config.json"
    return json.loads(file.read_text()).get("torch_dtype") if file.exists() else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def marked(page: str) -> list[str]:
    """Returns the names of the places that a page marks."""
    return re.findall(r"^<!-- (\w+):begin -->$", page, re.MULTILINE)


def replace(page: str, name: str, text: str) -> str:
    """Returns the page with `text` in the place of that name."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: begin + text + end, page)


def content(page: str, name: str) -> str:
    """Returns the text between the marks of that name."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    return page.partition(begin)[2].partition(end)[0]


def print_and_append(
    records: Sequence[BenchRecord], path: Path | None, leave_out: Sequence[str] = ()
) -> None:
    """Prints a table of the records, and appends them to a file.

    Args:
        path: file of JSON lines; None appends to none.
        leave_out: metrics that are in the file but not in the table.
    """
    print(format_table(records, leave_out), flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(path, records)
