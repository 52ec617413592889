"""Connections between the stages of a pipeline. The ranks of a stage share its layers."""

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
    """Returns the stage of a rank. Rank 0, the engine's process, is in the last stage, because that
    stage samples tokens."""
    return stages - 1 - rank // (world // stages)


class Channel:
    """A one-way connection between two ranks. The receiver gets tensors in the order of sending.

    It uses broadcasts in a group of two, because `torch.distributed.send` may create another
    communicator.
    """

    def __init__(self, handle: dist.ProcessGroup, sender: int) -> None:
        self._handle = handle
        self._sender = sender
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Starts to send a tensor, which must not change afterwards.

        The call does not wait until the tensor is received, except during a graph capture. A graph
        must contain the end of all work that it starts.
        """
        raw = _raw(x.contiguous())
        work = dist.broadcast(raw, self._sender, group=self._handle, async_op=True)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            work.wait()
            return
        self._sent.append((work, raw))
        while self._sent[0][0].is_completed() and len(self._sent) > 1:
            self._sent.popleft()

    def receive(self, x: Tensor) -> None:
        """Fills `x`, a contiguous tensor of the sent shape and dtype.

        On a GPU the current stream waits for the data. On a CPU the caller waits.
        """
        dist.broadcast(_raw(x), self._sender, group=self._handle)


class Pipeline:
    """This rank's stage and its connections to other stages.

    All ranks must have joined the world's group, and must make their pipelines together. A rank
    exchanges hidden states with the rank of the same number in the neighbouring stages, and gets
    results from that rank in the last stage.

    Args:
        stages: number of stages.
        timeout: time limit of gloo's collectives, in seconds.

    Attributes:
        stage: number of this rank's stage, from 0.
        group: the ranks of this stage.
    """

    def __init__(self, stages: int, timeout: float) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._limit = timedelta(seconds=timeout)
        self.stages = stages
        self.stage = stage_of(rank, world, stages)
        each = world // stages
        own = rank % each

        def rank_of(stage: int, number: int) -> int:
            return (stages - 1 - stage) * each + number

        groups = [
            self._join([rank_of(stage, number) for number in range(each)])
            for stage in range(stages)
        ]
        self.group = TorchGroup(groups[self.stage])
        self._previous: Channel | None = None
        self._next: Channel | None = None
        self._results: list[Channel] = []
        for stage in range(stages - 1):
            for number in range(each):
                sender, last = rank_of(stage, number), rank_of(stages - 1, number)
                link = self._join([sender, rank_of(stage + 1, number)])
                results = self._join([sender, last])
                if number != own:
                    continue
                if stage == self.stage:
                    self._next = Channel(link, sender)
                if stage + 1 == self.stage:
                    self._previous = Channel(link, sender)
                if self.stage in (stage, stages - 1):
                    self._results.append(Channel(results, last))

    def _join(self, ranks: Sequence[int]) -> Any:
        # All ranks make all groups, in the same order.
        handle = dist.new_group(list(ranks), timeout=self._limit)
        if dist.get_rank() in ranks and dist.get_backend() == "nccl":
            # The first collective connects the ranks, and each waits for the other. During a step
            # this could be a deadlock, so a dummy collective runs now.
            dist.broadcast(torch.zeros(1, device="cuda"), ranks[0], group=handle)
        return handle

    def receive(self, hidden: Tensor) -> None:
        """Fills `hidden` with the tensor that the previous stage has sent."""
        if self._previous is not None:
            self._previous.receive(hidden)

    def send(self, hidden: Tensor) -> None:
        """Sends `hidden` to the next stage."""
        if self._next is not None:
            self._next.send(hidden)

    def send_results(self, results: Tensor) -> None:
        """Sends a step's results, int32 [rows, width], from the last stage to all others."""
        for channel in self._results:
            channel.send(results)

    def receive_results(self, results: Tensor) -> None:
        """Fills `results` with the next results from the last stage, in the order of steps."""
        self._results[0].receive(results)


def _raw(x: Tensor) -> Tensor:
    """Returns a view of the tensor's bytes, because some backends do not support all dtypes."""
    return x.view(torch.uint8)
