"""Handling of Ctrl-C while an engine runs in this process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_IMPATIENT = 3
"""Interrupts after which one takes effect in the midst of a step."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C until the function that it yields is called.

    In the midst of a step it would leave scheduler and device at odds. The third one does not wait.
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
