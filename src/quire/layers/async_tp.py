"""`--async-tp`: a long step is computed as two halves, so that all-reduces cost less time.

Every part of a layer ends with an all-reduce. While the all-reduce of one half runs on a second
stream, the main stream computes the same part of the other half:

    main stream   attention 0 | attention 1 | mlp 0        | mlp 1        | attention 0 ...
    side stream               | reduce att 0| reduce att 1 | reduce mlp 0 | reduce mlp 1 ...

The first half holds the first tokens of the step. Its KV is stored before the second half's
attention reads it, so the cut may go through a request.

In `engine/ranks/async_tp.py` a list says for which models this is allowed, and the group is made.
With "auto" the group measures at the start from how many tokens on halves are faster.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from quire.errors import QuireError
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.residual import Residual
from quire.parallel import ProcessGroup
from quire.parallel.group import AllReduceNorm
from quire.parallel.torch_group import TorchGroup

if TYPE_CHECKING:  # `exchange` imports triton, which a CPU does not have.
    from quire.parallel.exchange import Exchange

logger = logging.getLogger("quire.parallel")

_FEWEST = 512
"""Steps with fewer tokens are not measured."""
_GAIN = 0.99
"""A step in halves counts as faster if it takes less than this part of a whole step's time."""
_UNIT = 64
"""The first half is a multiple of this many tokens, because matrix products compute such tiles."""


@dataclass(frozen=True, slots=True)
class _SideWork:
    """An all-reduce on the side stream.

    Attributes:
        done: event after its last kernel.
        work: the function that launched it. It keeps the tensors alive that the kernels read.
        finish: launches the rest of the work on the main stream before the result is used, or None.
    """

    done: torch.cuda.Event
    work: Callable[[], Any]
    finish: Callable[[], None] | None


class HalvesGroup(TorchGroup):
    """A group whose all-reduces overlap the other half's work within `halves`.

    Only all-reduces with a residual overlap. Their result is ready when their half has its next
    turn. `inner` does all other collectives.

    Attributes:
        inner: the group of the same ranks that does the collectives.
        halves_from: steps of at least this many tokens are computed as two halves.
        exchange: all-reduces by copies between GPUs, which occupy no multiprocessor. Without it,
            or for a tensor that it refuses, `inner` runs on the side stream. Its kernels then share
            the multiprocessors with the other half's.
        measured: whether the runner has to call `choose`.
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
        # The side stream has priority because its kernels are few and small.
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._half: int | None = None
        self._running: list[_SideWork | None] = [None, None]
        self._counts = [0, 0]

    def choose(self, seconds: Callable[[int], float], most: int) -> None:
        """Sets `halves_from` to the fewest tokens from which on steps are faster as halves.

        Tries `most` tokens, then half of them, and so on, while halves are faster.

        Args:
            seconds: runs a step of this many tokens, in halves or whole by `halves_from`, and
                returns its time. All ranks must get the same time, so that they choose alike.
            most: most tokens of a step.
        """

        def timed(tokens: int, halves_from: int) -> float:
            self.halves_from = halves_from
            found = seconds(tokens)
            how = "whole" if halves_from else "in halves"
            logger.info("steps of %d tokens %s: %.2f ms", tokens, how, 1e3 * found)
            return found

        least, tokens = sys.maxsize, most
        while tokens >= _FEWEST and timed(tokens, 0) < _GAIN * timed(tokens, sys.maxsize):
            least, tokens = tokens, tokens // 2
        self.halves_from = least
        logger.info("async_tp=auto: %s", self.described)

    @property
    def described(self) -> str:
        """A description, for logs, of the steps that run as halves."""
        least = self.halves_from
        return "off" if least == sys.maxsize else f"steps of at least {least} tokens are two halves"

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        out: Tensor
        half = self._half
        if half is None or residual is None:
            return self.inner.all_reduce(x, residual, name)
        exchange = self.exchange
        if exchange is None or not exchange.takes(x, residual):
            out = self.overlap(lambda: self.inner.all_reduce(x, residual, name))
            return out
        slot = 2 * half + self._counts[half] % 2
        self._counts[half] += 1
        out = torch.empty_like(x)

        def collect() -> None:
            exchange.collect(slot, x, residual, out, name)

        self.overlap(lambda: exchange.send(slot, x), collect)
        return out

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        """None within `halves`: an all-reduce that waits for the norm could not overlap."""
        return self.inner.all_reduce_norm if self._half is None else None

    def overlap(self, work: Callable[[], Any], finish: Callable[[], None] | None = None) -> Any:
        """Calls `work` so that its kernels run on the side stream, and returns its result.

        The kernels start after all that the main stream has launched so far. Outside of `halves`,
        and on a CPU, both functions are called at once.

        Args:
            work: launches kernels. The tensors that it refers to live until the half's next turn.
            finish: called at the beginning of the half's next turn, on the main stream.
        """
        half = self._half
        if half is None or self._side is None:
            given = work()
            if finish is not None:
                finish()
            return given
        self._finish(half)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            given = work()
        self._running[half] = _SideWork(self._side.record_event(), work, finish)
        return given

    @property
    def overlapping(self) -> bool:
        """Whether the step is computed as halves, and all-reduces go through `overlap`."""
        return self._half is not None

    @contextmanager
    def halves(self) -> Iterator[None]:
        """Lets all-reduces overlap within the block. Each half's work must follow its `turn`, and
        all ranks must take the same turns.

        Raises:
            QuireError: a half had an odd number of all-reduces. The first one of the next step
                would then reuse the exchange's slot of the last one too early.
        """
        self._counts = [0, 0]
        try:
            yield
            for half in (0, 1):
                self._finish(half)
            if any(count % 2 for count in self._counts):
                raise QuireError("each half of a step must have an even number of all-reduces")
        finally:
            self._half = None
            self._running = [None, None]

    def turn(self, half: int) -> None:
        """Begins work on half 0 or 1, after that half's last all-reduce has ended."""
        self._finish(half)
        self._half = half

    def _finish(self, half: int) -> None:
        running, self._running[half] = self._running[half], None
        if running is not None:
            torch.cuda.current_stream(running.done.device).wait_event(running.done)
            if running.finish is not None:
                running.finish()

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.inner.all_gather(x, dim)

    def started(self) -> None:
        self.inner.started()

    def end_waits(self) -> None:
        self.inner.end_waits()

    def check(self, step_id: int) -> None:
        self.inner.check(step_id)


def run_halves(
    group: ProcessGroup, hidden: Tensor, batch: ForwardBatch,
    layers_for: Callable[[ForwardBatch], Sequence[Any]],
) -> Tensor:  # fmt: skip
    """Returns the same as `DecoderLayers.run`, computed as two halves.

    Args:
        group: the layers' `HalvesGroup`.
        hidden: [T, hidden_size], the input of the first layer.
        batch: the whole step.
        layers_for: `DecoderLayers.layers_for`. All layers must be `Block`s.
    """
    group = cast(HalvesGroup, group)
    first = first_half(len(hidden))
    parts = split_batch(batch, first)
    layers = [layers_for(part) for part in parts]
    streams = [Residual(hidden[:first]), Residual(hidden[first:])]
    with group.halves():
        for pair in zip(*layers, strict=True):
            for half, (block, own, cache) in enumerate(pair):
                group.turn(half)
                streams[half] = block.attention(
                    streams[half], block.attention_norm, parts[half], own, cache
                )
            for half, (block, _, _) in enumerate(pair):
                group.turn(half)
                streams[half] = block.mlp(streams[half], block.mlp_norm, parts[half])
    return torch.cat([stream.total() for stream in streams])


def first_half(tokens: int) -> int:
    """Returns the number of tokens in the first half of a step of `tokens`."""
    return tokens // 2 // _UNIT * _UNIT or tokens // 2


def split_batch(batch: ForwardBatch, first: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Returns the batches of the first `first` tokens and of the other tokens.

    Both batches have all rows. A row without tokens in a half has length 0 there, like padding.
    """
    count = len(batch.input_ids)
    starts = batch.query_start.clamp(max=first), (batch.query_start - first).clamp(min=0)
    second_lens = starts[1].diff()
    q_lens = tuple(_first_half_lens(batch.q_lens, first))
    others = tuple(whole - own for whole, own in zip(batch.q_lens, q_lens, strict=True))
    lengths = (
        (batch.seq_lens - second_lens).where(starts[0].diff() > 0, 0),
        batch.seq_lens.where(second_lens > 0, 0),
    )

    def part(index: int, low: int, high: int, q_lens: tuple[int, ...]) -> ForwardBatch:
        return replace(
            batch,
            input_ids=batch.input_ids[low:high],
            positions=batch.positions[low:high],
            query_start=starts[index],
            seq_lens=lengths[index],
            groups=tuple(GroupBatch(own.slots[low:high], own.block_table) for own in batch.groups),
            q_lens=q_lens,
            max_q_len=min(batch.max_q_len, high - low),
        )

    return part(0, 0, first, q_lens), part(1, first, count, others)


def _first_half_lens(q_lens: Sequence[int], first: int) -> list[int]:
    """Returns how many of each row's tokens are among the step's first `first` tokens."""
    found = []
    for length in q_lens:
        found.append(min(length, first))
        first -= found[-1]
    return found
