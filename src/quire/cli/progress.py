"""A progress bar of the engine's start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

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
