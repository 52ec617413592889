"""Work that may never end, on threads that the engine can give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Calls `work` on a thread of its own, which the process's end does not wait for. Returns what
    it will return."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
