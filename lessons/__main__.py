"""Runs a lesson by its number: python -m lessons 2 [options of the lesson].

Without a number it lists the lessons.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def folders() -> dict[int, str]:
    """Returns the lessons' folders by number."""
    found = sorted(path.parent.name for path in HERE.glob("[0-9][0-9]_*/lesson.py"))
    return {int(name[:2]): name for name in found}


def main(arguments: list[str]) -> None:
    found = folders()
    if not arguments or not arguments[0].isdigit() or int(arguments[0]) not in found:
        print("python -m lessons NUMBER [options]\n")
        for folder in found.values():
            print(f"  {folder[:2]}  {(HERE / folder / 'README.md').open().readline()[2:].strip()}")
        sys.exit(0 if not arguments else 2)
    folder = found[int(arguments[0])]
    importlib.import_module(f"lessons.{folder}.lesson").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
