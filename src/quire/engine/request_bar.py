"""A progress bar of `LLM`'s requests, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn


@contextlib.contextmanager
def request_bar(total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call for each request that is done."""
    console = Console(stderr=True)
    columns = "Requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
