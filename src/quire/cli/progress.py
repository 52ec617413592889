"""Progress on the terminal: a bar of the engine's start, and the time that work has left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
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
def amount_bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that is told what is done, and all, and draws a bar of it with the time
    left. Nothing is drawn where there is no terminal."""
    progress = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=None)

    def update(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        progress.stop()


class TimeLeft:
    """Estimates the rest of work from the parts that are done, each taken for equally long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()

    def text(self, done: int, total: int) -> str:
        """Returns "3 of 12 done", and behind it the time left once there is something to go by."""
        position = f"{done} of {total} done"
        if not 0 < done < total:
            return position
        seconds = (self._clock() - self._began) / done * (total - done)
        return f"{position}, about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Returns a time for people: "40 s", "3 min", "2 h 5 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
