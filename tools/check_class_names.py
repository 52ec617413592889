"""Fails where two files of the package define a top-level class of the same name."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "quire"


def main() -> int:
    repeated = {name: files for name, files in defined().items() if len(files) > 1}
    for name, files in sorted(repeated.items()):
        print(f"class {name}: {', '.join(files)}")
    return 1 if repeated else 0


def defined() -> dict[str, list[str]]:
    """Returns the files that define each top-level class, by its name."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(file.relative_to(SOURCE)))
    return files


if __name__ == "__main__":
    sys.exit(main())
