"""Fails where the core names a feature.

Features reach the scheduler, the engine's loop and the model runner through small interfaces only
(`scheduler/feature.py`, `features/loop_feature.py`, `runner/hooks/hook.py`). A feature's name in
their code would be the first step to a branch for it. So identifiers, imports and string literals
are searched; comments and docstrings may explain the interfaces.

The banned names are those of the features' packages and their modules, and words of features that
are not packages. Each checked file may be exempt from some words (`ALLOWED`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "quire"

FEATURES = SOURCE / "features"
PACKAGES = tuple(sorted(path.name for path in FEATURES.iterdir() if path.is_dir()))
WORDS = (
    "adapter", "speculat", "ngram", "eagle", "medusa", "grammar", "guidance", "json_schema",
    "vision", "multimodal", "pooler", "gate", "mask", "tenant", "transfer", "disk",
)  # fmt: skip
COMMON = (
    "api", "args", "calls", "costs", "feature", "fields", "hook", "loop", "messages", "metrics",
    "registry", "settings", "stats",
)  # fmt: skip
"""Module names of features that say nothing."""

CHECKED = (
    "scheduler", "engine/loop/core.py", "engine/loop/messages.py", "engine/loop/calls.py",
    "engine/loop/stats.py", "engine/process/process.py", "engine/process/remote_engine.py",
    "runner/model_runner.py", "runner/graphs.py",
    "runner/program.py",
)  # fmt: skip
INTERFACE = ("gate", "transfer")
"""Words of `scheduler/feature.py`: a head can wait, and blocks can move, for any feature."""
RUNNER = ("gate", "mask", "transfer", "disk", "adapter")
ALLOWED: dict[str, tuple[str, ...]] = {
    "scheduler/feature.py": INTERFACE,
    "scheduler/scheduler.py": INTERFACE,
    "scheduler/fair_share": ("tenant", "mask"),
    "scheduler/order.py": ("tenant", "mask"),
    # A request's tenant is a field of every request, which the scheduler's fair share reads.
    "engine/loop/messages.py": ("tenant",),
    "engine/process/process.py": ("tenant",),
    "runner/model_runner.py": RUNNER,
    "runner/graphs.py": RUNNER,
    "runner/program.py": RUNNER,
}


def main() -> int:
    found = [finding for file in checked_files() for finding in findings(file, banned(file))]
    for finding in found:
        print(finding)
    return 1 if found else 0


def checked_files() -> Iterator[Path]:
    for name in CHECKED:
        path = SOURCE / name
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        elif path.exists():
            yield path


def feature_names() -> set[str]:
    """Returns the names of features' packages and of their modules."""
    names = set(PACKAGES)
    for package in PACKAGES:
        names |= {file.stem for file in (FEATURES / package).rglob("*.py")}
    return {name.strip("_") for name in names} - set(COMMON) - {"init"}


def banned(file: Path) -> re.Pattern[str]:
    """Returns what a file may not name: words anywhere, feature names as whole words."""
    place = file.relative_to(SOURCE).as_posix()
    allowed = {w for prefix, words in ALLOWED.items() if place.startswith(prefix) for w in words}
    anywhere = "|".join(word for word in WORDS if word not in allowed)
    names = sorted(n for n in feature_names() if not any(word in n for word in allowed))
    whole = "|".join(map(re.escape, names))
    return re.compile(rf"{anywhere}|(?<![a-z])(?:{whole})(?![a-z])", re.IGNORECASE)


def findings(file: Path, pattern: re.Pattern[str]) -> Iterable[str]:
    tree = ast.parse(file.read_text())
    docstrings = set(docstrings_of(tree))
    for node in ast.walk(tree):
        for text in names(node, docstrings):
            if pattern.search(text):
                line = getattr(node, "lineno", 0)
                yield f"{file.relative_to(SOURCE)}:{line}: names a feature: {text[:60]!r}"


def docstrings_of(tree: ast.AST) -> Iterator[int]:
    """Yields the ids of bare string statements: docstrings of modules, classes, functions and
    attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def names(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    for field in ("id", "attr", "name", "arg", "module", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ):
        yield node.value


if __name__ == "__main__":
    sys.exit(main())
