"""Runs the lessons.

    python -m lessons                     # the list
    python -m lessons 4                   # lesson 4
    python -m lessons 4 --mine mine.py    # lesson 4, with your engine in place of ours
    python -m lessons all                 # one after the other
    python -m lessons mine 3              # prints our mine.py as it is after lesson 3
    python -m lessons check 3             # checks your answers to the exercises of lesson 3

Arguments after a number or `all` go to the lessons: python -m lessons 4 --help
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from lessons import pages

HERE = Path(__file__).parent
MINE = "--mine"


def folders() -> dict[int, str]:
    """Returns the lessons' folders by number."""
    found = sorted(path.parent.name for path in HERE.glob("[0-9][0-9]_*/lesson.py"))
    return {int(name[:2]): name for name in found}


def title(folder: str) -> str:
    """Returns the heading of a lesson's page."""
    return (HERE / folder / "README.md").read_text("utf-8").partition("\n")[0].lstrip("# ")


def use(file: str) -> None:
    """Makes a reader's file the engine of the lessons. Exits with status 2 if there is none."""
    spec = importlib.util.spec_from_file_location("lessons.mine", Path(file).resolve())
    if spec is None or spec.loader is None or not Path(file).exists():
        print(f"{MINE}: no such Python file: {file}", file=sys.stderr)
        sys.exit(2)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: its dataclasses look their module up
    spec.loader.exec_module(module)
    importlib.import_module("lessons").mine = module  # type: ignore[attr-defined]


def run(folder: str, arguments: list[str]) -> None:
    """Runs a lesson in this process."""
    if MINE in arguments:
        place = arguments.index(MINE)
        use(arguments[place + 1] if place + 1 < len(arguments) else "")
        arguments = arguments[:place] + arguments[place + 2 :]
    try:
        importlib.import_module(f"lessons.{folder}.lesson").main(arguments)
    except AttributeError as error:
        if getattr(error.obj, "__name__", "") != "lessons.mine":
            raise
        print(f"{MINE}: the file has no {error.name} yet", file=sys.stderr)
        sys.exit(2)


def check(number: int) -> int:
    """Checks the answers in a lesson's `exercises.py`, and returns the exit status."""
    if importlib.util.find_spec("pytest") is None:
        print("checks need pytest, which `make learn` installs", file=sys.stderr)
        return 2
    test = f"tests/lessons/test_lesson_{number:02}.py"
    # The settings of all tests need more than `make learn` installs, so they stay outside.
    command = [sys.executable, "-m", "pytest", "-q", "--confcutdir", "tests/lessons"]
    command += ["-k", "not prints_its_claims", test, "--answers", "exercises"]
    return subprocess.run(command, cwd=HERE.parent).returncode


def run_all(arguments: list[str]) -> int:
    """Runs all lessons, and returns the exit status of the first that fails."""
    for number, folder in folders().items():
        print(f"\n== {number}. {title(folder)}\n", flush=True)
        # Each in a process of its own: what one leaves behind is no part of the next.
        done = subprocess.run([sys.executable, "-m", "lessons", str(number), *arguments])
        if done.returncode:
            return done.returncode
    return 0


def numbered(word: str) -> int:
    """Returns a lesson's number. Exits with status 2 if there is no such lesson."""
    found = folders()
    if not word.isdigit() or int(word) not in found:
        print(f"no lesson {word!r}: they are 1 to {max(found)}\n", file=sys.stderr)
        sys.exit(2)
    return int(word)


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            print(__doc__)
            for folder in folders().values():
                print(f"  {folder[:2]}  {title(folder)}")
        case ["all", *rest]:
            sys.exit(run_all(rest))
        case ["mine", word]:
            print(pages.until(numbered(word)), end="")
        case ["check", word]:
            sys.exit(check(numbered(word)))
        case [word, *rest]:
            run(folders()[numbered(word)], rest)


if __name__ == "__main__":
    main(sys.argv[1:])
