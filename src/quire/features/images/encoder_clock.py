"""The device's time for encoding images."""

from __future__ import annotations

import time
from collections import deque

import torch


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class EncoderClock:
    """Measures the device's time for what runs within it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._total = 0.0
        self._began = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        if self._on_device:
            self.seconds()  # Drops the events of work that has ended.
            began, ended = (_event() for _ in range(2))
            began.record()
            self._events.append((began, ended))
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_device:
            self._events[-1][1].record()
        else:
            self._total += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Returns the time of all work that has ended."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._events.popleft()
            self._total += began.elapsed_time(ended) / 1e3
        return self._total
