"""Fails where a docstring begins with a word that leaves its subject to be guessed.

Docstrings begin with a verb or with their subject. Those of modules, classes, functions and
attributes are searched, in the package, its tests, the tools and the benchmarks.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEARCHED = ("src/quire", "tests", "tools", "bench", "examples", "lessons")
REFUSED = re.compile(
    r"\W*(what|of|as|those|who|whom|whose|where|which|it|its|they|their|how|nobody)\b",
    re.IGNORECASE,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true", help="print one line per folder")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    for name in SEARCHED:
        for file in sorted((ROOT / name).rglob("*.py")):
            folder = folder_of(file.relative_to(ROOT))
            for line, start in findings(file):
                counts[folder] = counts.get(folder, 0) + 1
                if not options.count:
                    print(f"{file.relative_to(ROOT)}:{line}: docstring begins with {start!r}")
    if options.count:
        for folder, count in sorted(counts.items()):
            print(f"{folder}: {count}")
    return 1 if counts else 0


def folder_of(file: Path) -> str:
    """Returns the package below `src/quire`, or the folder and its first subfolder elsewhere."""
    depth = 3 if file.parts[0] == "src" else 2
    return "/".join(file.parent.parts[:depth])


def findings(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the first words of each docstring that begins with a refused word."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = node.value.value
        if not isinstance(text, str):
            continue
        if REFUSED.match(text):
            yield node.lineno, " ".join(text.split()[:4])


if __name__ == "__main__":
    sys.exit(main())
