"""A run of many checks and timings in limited time."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from timing import DEVICE

from quire.ops.triton.launch import compiling

T = TypeVar("T")


def only(text: str, parts: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yields the parts whose names contain the text."""
    return ((name, part) for name, part in parts if text in name)


class Session:
    """Runs parts in limited time.

    Attributes:
        failed: the failures with their reasons; a failure does not end the run.
        skipped: names of the parts for which no time was left.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.failed: list[str] = []
        self.skipped: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def each(self, parts: Iterable[tuple[str, Callable[[], T]]], until: float) -> Iterator[T]:
        """Yields the results of parts that succeed. Begins no part after `until` seconds."""
        for name, part in parts:
            if self.seconds > until:
                self.skipped.append(name)
                continue
            try:
                found = part()
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc()
            else:
                yield found

    def compile(self, parts: Iterable[tuple[str, Callable[[], object]]]) -> None:
        """Compiles the kernels of parts on all cores. A failure shows when the part runs."""
        if DEVICE != "cuda":
            return
        with compiling(os.cpu_count() or 4):
            for _, part in parts:
                with contextlib.suppress(Exception):
                    part()
        print(f"compiled after {self.seconds:.0f} s", flush=True)

    def check(self, checks: Iterable[tuple[str, Callable[[], float]]], until: float) -> None:
        """Runs checks. Each returns its worst error as a share of the allowed error."""
        checks = list(checks)
        self.compile(checks)

        def judged(name: str, check: Callable[[], float]) -> None:
            worst = check()
            if not worst <= 1.0:
                self.failed.append(f"{name}: error {worst:.3g} of what is allowed")

        def all_of_them() -> Iterator[tuple[str, Callable[[], None]]]:
            for name, check in checks:
                yield f"check {name}", lambda name=name, check=check: judged(name, check)

        count = sum(1 for _ in self.each(all_of_them(), until))
        print(f"{count} checks, {len(self.failed)} failures, {self.seconds:.0f} s", flush=True)

    def report(self) -> int:
        """Prints what failed and what no time was left for. Returns the exit status."""
        if self.skipped:
            print(f"skipped for lack of time: {', '.join(self.skipped)[:2000]}")
        print(f"{self.seconds:.0f} s; {len(self.failed)} failures")
        print("".join(f"  {failure}\n" for failure in self.failed), end="")
        return 1 if self.failed else 0
