"""Fails where the scheduler or the model runner names a feature.

Features reach both through small interfaces only (`scheduler/feature.py`, `runner/hooks/hook.py`).
A name of one in their code would be the first step to a branch for it, so identifiers, imports and
string literals are searched; comments and docstrings may explain what the interfaces are for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "quire"
FEATURES = re.compile(
    r"lora|adapter|speculat|ngram|eagle|medusa|grammar|structured|guidance|json_schema|offload"
    r"|disagg|multimodal|vision|embedding_request|pooling",
    re.IGNORECASE,
)


def main() -> int:
    files = sorted((SOURCE / "scheduler").rglob("*.py"))
    files.append(SOURCE / "runner" / "model_runner.py")
    found = [finding for file in files if file.exists() for finding in findings(file)]
    for finding in found:
        print(finding)
    return 1 if found else 0


def findings(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    docstrings = set(docstrings_of(tree))
    for node in ast.walk(tree):
        for text in names(node, docstrings):
            if FEATURES.search(text):
                line = getattr(node, "lineno", 0)
                yield f"{file.relative_to(SOURCE)}:{line}: names a feature: {text[:60]!r}"


def docstrings_of(tree: ast.AST) -> Iterator[int]:
    """The ids of bare string statements: docstrings of modules, classes, functions, attributes."""
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
