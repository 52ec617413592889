"""A bar for loading weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """A callback that draws a bar, which goes away when all is loaded. Nothing is drawn where
    there is no terminal."""
    progress = Progress(
        TextColumn("Loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("load", total=None)

    def update(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()

    try:
        yield update
    finally:
        progress.stop()
