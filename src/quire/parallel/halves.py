"""Ranks that compute long steps as two halves: sums over ranks of one run beside the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.errors import QuireError
from quire.parallel.group import SumNormed
from quire.parallel.torch_group import TorchGroup

if TYPE_CHECKING:
    from quire.parallel.exchange import Exchange


@dataclass(frozen=True, slots=True)
class _Running:
    """Work on the second stream. done: an event behind it. work: holds what it reads. behind: what
    is left to do where its result is needed."""

    done: torch.cuda.Event
    work: Callable[[], Any]
    behind: Callable[[], None] | None


class HalvesGroup(TorchGroup):
    """Another group's ranks and collectives. Within `halves`, sums that have a residual run on a
    second stream: their results are there once their half's turn comes again.

    inner: sums all else. halves_from: the tokens from which steps are computed as two halves.
    exchange: sums beside other work, as far as it takes them; None: `inner` does, and its kernels
        then share the multiprocessors.
    measured: whether `halves_from` is still to be found by measurement.
    """

    def __init__(
        self,
        inner: TorchGroup,
        halves_from: int,
        device: torch.device,
        exchange: Exchange | None = None,
        *,
        measured: bool = True,
    ) -> None:
        super().__init__(inner.handle)
        self.inner = inner
        self.halves_from = halves_from
        self.measured = measured
        self.exchange = exchange
        # Its kernels are few and small: they go first where a multiprocessor comes free.
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._half: int | None = None
        self._running: list[_Running | None] = [None, None]
        self._counts = [0, 0]

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        out: Tensor
        half = self._half
        if half is None or residual is None:
            return self.inner.all_reduce(x, residual, name)
        exchange = self.exchange
        if exchange is None or not exchange.takes(x, residual):
            out = self.beside(lambda: self.inner.all_reduce(x, residual, name))
            return out
        slot = 2 * half + self._counts[half] % 2
        self._counts[half] += 1
        out = torch.empty_like(x)

        def collect() -> None:
            exchange.collect(slot, x, residual, out, name)

        self.beside(lambda: exchange.send(slot, x), collect)
        return out

    @property
    def sum_normed(self) -> SumNormed | None:
        """Within `halves` no sum waits for a norm: it is to run beside the other half."""
        return self.inner.sum_normed if self._half is None else None

    def beside(self, work: Callable[[], Any], behind: Callable[[], None] | None = None) -> Any:
        """Returns what `work` returns, whose kernels run on the second stream, behind all that was
        launched so far. Tensors that it reads are kept until the half's next turn, at whose begin
        `behind` is called. Outside of `halves`, and on a CPU, it is all done at once."""
        half = self._half
        if half is None or self._side is None:
            given = work()
            if behind is not None:
                behind()
            return given
        self._finish(half)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            given = work()
        self._running[half] = _Running(self._side.record_event(), work, behind)
        return given

    @property
    def beside_now(self) -> bool:
        """Whether sums are to be left to `beside`."""
        return self._half is not None

    @contextmanager
    def halves(self) -> Iterator[None]:
        """Lets sums run beside other work within the block, where each half's work follows its
        `turn`. All ranks take the same turns.

        Raises:
            QuireError: a half had an odd number of sums, and its next one would take the place in
                the exchange that the last one had.
        """
        self._counts = [0, 0]
        try:
            yield
            for half in (0, 1):
                self._finish(half)
            if any(count % 2 for count in self._counts):
                raise QuireError("the sums of a half of a step must be even in number")
        finally:
            self._half = None
            self._running = [None, None]

    def turn(self, half: int) -> None:
        """Begins work of one half, whose last sum is there from now on."""
        self._finish(half)
        self._half = half

    def _finish(self, half: int) -> None:
        running, self._running[half] = self._running[half], None
        if running is not None:
            torch.cuda.current_stream(running.done.device).wait_event(running.done)
            if running.behind is not None:
                running.behind()

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.inner.all_gather(x, dim)

    def started(self) -> None:
        self.inner.started()

    def end_waits(self) -> None:
        self.inner.end_waits()

    def check(self, step_id: int) -> None:
        self.inner.check(step_id)
