"""An engine in the caller's terminal: Ctrl-C, and the progress of its requests."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

_IMPATIENT = 3
"""The interrupt with this number takes effect at once, even during a step."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C until the caller calls the function that this yields.

    An interrupt during a step would leave the scheduler and the device in different states. The
    third Ctrl-C takes effect at once.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        held += 1
        if held >= _IMPATIENT:
            previous(number, frame)

    def let() -> None:
        nonlocal held
        if held:
            held = 0
            previous(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let
    finally:
        signal.signal(signal.SIGINT, previous)
    let()


# A progress bar of `LLM`'s requests, on a terminal.


@contextlib.contextmanager
def request_bar(total: int) -> Iterator[Callable[[], None]]:
    """Yields a function that the caller calls for each finished request."""
    console = Console(stderr=True)
    columns = "Requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
