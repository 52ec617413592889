"""Progress on the terminal: a bar of the engine's start, and the time that work has left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)

from quire.executor import OnProgress

_TITLES = {"weights": "Loading weights", "graphs": "Capturing CUDA graphs"}


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """Yields a callback that draws a bar, which goes away when all is done.

    Nothing is drawn where there is no terminal.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=None, amount="")

    def update(what: str, done: int, total: int) -> None:
        progress.start()
        amount = f"{decimal(done)} of {decimal(total)}" if what == "weights" else f"{done}/{total}"
        progress.update(task, description=_TITLES[what], completed=done, total=total, amount=amount)
        if done >= total:
            progress.stop()

    try:
        yield update
    finally:
        progress.stop()


@contextlib.contextmanager
def amount_bar(
    console: Console, title: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that takes the parts done and all parts, and draws a bar with time left.

    Without a terminal it prints a line for every tenth of the parts instead.
    """
    left: TimeLeft | None = None
    shown = 0
    progress = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        # Rich's own estimate forgets what is older than 30 s, which one part may take.
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=None, left="")

    def update(done: int, total: int) -> None:
        nonlocal left, shown
        tenth = 10 * done // max(1, total)
        if left is None:
            left, shown = TimeLeft(done, clock), tenth
        progress.start()
        progress.update(task, completed=done, total=total, left=left.estimate(done, total))
        if tenth > shown and not console.is_terminal:
            shown = tenth
            typer.echo(f"{title}: {left.text(done, total)}", err=True)

    try:
        yield update
    finally:
        progress.stop()


class TimeLeft:
    """Estimates the rest of work from the parts that are done, each taken for equally long.

    Args:
        before: parts that an earlier run has done.
        clock: seconds that pass.
    """

    def __init__(self, before: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._before = before
        self._clock = clock
        self._began = clock()

    def estimate(self, done: int, total: int) -> str:
        """Returns "about 3 min left"; "" if nothing is done yet, or everything."""
        own = done - self._before
        if own <= 0 or done >= total:
            return ""
        return f"about {duration((self._clock() - self._began) / own * (total - done))} left"

    def text(self, done: int, total: int) -> str:
        """Returns "3 of 12 done", followed by the estimate."""
        estimate = self.estimate(done, total)
        return f"{done} of {total} done" + (f", {estimate}" if estimate else "")


def counted(number: int, noun: str) -> str:
    """Returns "1 line", "2 lines"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Returns a time for people: "40 s", "3 min", "2 h 5 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
