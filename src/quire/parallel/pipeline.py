"""The ranks of a pipeline: stages, each of ranks that share its layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.parallel.torch_group import TorchGroup


def stage_of(rank: int, world: int, stages: int) -> int:
    """Returns the stage of a rank. The engine's process, rank 0, is in the last stage, where tokens
    are drawn."""
    return stages - 1 - rank // (world // stages)


class Channel:
    """Two ranks, of which one sends and the other receives, in the same order.

    What passes is a broadcast of two, as a `send` might make a communicator of its own.
    """

    def __init__(self, handle: dist.ProcessGroup, sender: int) -> None:
        self._handle = handle
        self._sender = sender
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Starts to send a tensor, which must not change any more. Nothing waits until it is
        received, but for a captured graph, which ends with all that it has begun."""
        raw = _raw(x.contiguous())
        work = dist.broadcast(raw, self._sender, group=self._handle, async_op=True)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            work.wait()
            return
        self._sent.append((work, raw))
        while self._sent[0][0].is_completed() and len(self._sent) > 1:
            self._sent.popleft()

    def receive(self, x: Tensor) -> None:
        """Fills a contiguous tensor of the shape and dtype that was sent; a GPU's stream waits for
        it, and on a CPU the caller."""
        dist.broadcast(_raw(x), self._sender, group=self._handle)


class Pipeline:
    """This rank's place in a pipeline, and its connections. All ranks of the world must be joined,
    and make theirs at once.

    stage: of `stages`. group: the ranks of the stage, which share its layers. Hidden states pass
    between ranks of the same number in neighbouring stages, results from those of the last stage to
    those of all others. timeout: seconds that a collective of gloo may take.
    """

    def __init__(self, stages: int, timeout: float) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._limit = timedelta(seconds=timeout)
        self.stages = stages
        self.stage = stage_of(rank, world, stages)
        each = world // stages
        own = rank % each

        def at(stage: int, number: int) -> int:
            return (stages - 1 - stage) * each + number

        groups = [
            self._join([at(stage, number) for number in range(each)]) for stage in range(stages)
        ]
        self.group = TorchGroup(groups[self.stage])
        self._before: Channel | None = None
        self._behind: Channel | None = None
        self._results: list[Channel] = []
        for stage in range(stages - 1):
            for number in range(each):
                sender, last = at(stage, number), at(stages - 1, number)
                link = self._join([sender, at(stage + 1, number)])
                results = self._join([sender, last])
                if number != own:
                    continue
                if stage == self.stage:
                    self._behind = Channel(link, sender)
                if stage + 1 == self.stage:
                    self._before = Channel(link, sender)
                if self.stage in (stage, stages - 1):
                    self._results.append(Channel(results, last))

    def _join(self, ranks: Sequence[int]) -> Any:
        # All ranks make all groups, in the same order.
        handle = dist.new_group(list(ranks), timeout=self._limit)
        if dist.get_rank() in ranks and dist.get_backend() == "nccl":
            # The first collective connects the ranks, and each waits there for the other: later,
            # one might wait for a step that the other has not been told of.
            dist.broadcast(torch.zeros(1, device="cuda"), ranks[0], group=handle)
        return handle

    def receive(self, hidden: Tensor) -> None:
        """Fills `hidden` with what the stage before has sent."""
        if self._before is not None:
            self._before.receive(hidden)

    def send(self, hidden: Tensor) -> None:
        """Sends to the stage behind."""
        if self._behind is not None:
            self._behind.send(hidden)

    def send_results(self, results: Tensor) -> None:
        """Sends a step's results, int32 [rows, width], from the last stage to all others."""
        for channel in self._results:
            channel.send(results)

    def receive_results(self, results: Tensor) -> None:
        """Fills `results` with the next that the last stage has sent."""
        self._results[0].receive(results)


def _raw(x: Tensor) -> Tensor:
    """Returns the tensor's bytes, a view: not every backend knows every dtype."""
    return x.view(torch.uint8)
