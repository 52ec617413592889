"""Runs a lesson by its number: python -m lessons 2 [options of the lesson].

`all` runs one after the other, each with the options that follow; without a number it lists the
lessons.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def folders() -> dict[int, str]:
    """Returns the lessons' folders by number."""
    found = sorted(path.parent.name for path in HERE.glob("[0-9][0-9]_*/lesson.py"))
    return {int(name[:2]): name for name in found}


def title(folder: str) -> str:
    """Returns the heading of a lesson's page."""
    return (HERE / folder / "README.md").read_text("utf-8").partition("\n")[0].lstrip("# ")


def main(arguments: list[str]) -> None:
    found = folders()
    if arguments[:1] == ["all"]:
        for number, folder in found.items():
            print(f"\n== {number}. {title(folder)}\n", flush=True)
            # Each in a process of its own: what one leaves behind is no part of the next.
            module = f"lessons.{folder}.lesson"
            done = subprocess.run([sys.executable, "-m", module, *arguments[1:]])
            if done.returncode:
                sys.exit(done.returncode)
        return
    if not arguments or not arguments[0].isdigit() or int(arguments[0]) not in found:
        if arguments:
            print(f"no lesson {arguments[0]!r}: they are 1 to {max(found)}\n", file=sys.stderr)
        print("python -m lessons NUMBER [options], or python -m lessons all [options]\n")
        for folder in found.values():
            print(f"  {folder[:2]}  {title(folder)}")
        sys.exit(0 if not arguments else 2)
    folder = found[int(arguments[0])]
    importlib.import_module(f"lessons.{folder}.lesson").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
