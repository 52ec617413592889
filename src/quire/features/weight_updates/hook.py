"""The runner's part: each rank writes its part of an update between two steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.executor import WorkerCall
from quire.features.weight_updates.broadcast_group import BroadcastGroup
from quire.features.weight_updates.commands import (
    ENTRY,
    AwaitThread,
    Command,
    Drop,
    Join,
    LeaveGroup,
    Prepare,
    Release,
    Restore,
    Write,
    decode,
)
from quire.features.weight_updates.open_sources import OpenSource, open_source
from quire.features.weight_updates.payloads import JoinGroup, Source
from quire.models import Decoder
from quire.models.decoder import DecoderLayers
from quire.models.draft_heads import DraftHead
from quire.models.families.family import Family
from quire.models.updates import WeightUpdate, has_tensors_of, reload_weights
from quire.ops import KVLayer
from quire.parallel.torch_group import global_rank, sum_over_all_ranks
from quire.runner.hooks.hook import HostHook
from quire.runner.kv_cache import KVCache
from quire.runner.readback import Step
from quire.runner.releasable import ReleasableMemory

_log = logging.getLogger("quire.engine")

UPDATES: WorkerCall[None, UpdateHook] = WorkerCall("weight_updates.hook")
"""Returns the hook of the first rank."""


@dataclass(slots=True)
class CommandOutcome:
    """The outcome of a command on all ranks.

    Attributes:
        error: the first rank's error, or one that stands for another rank's; None: success.
        seconds: how long the command took on this rank.
        bytes: bytes that it wrote, or gave up.
    """

    error: QuireError | None
    seconds: float
    bytes: int = 0


@dataclass(slots=True)
class _Prepared:
    """An update whose source is open.

    Attributes:
        stack: closes the source.
        source: the open source.
        update: the update, checked against the model.
        drafts: the same for draft heads whose tensors the source has too.
    """

    stack: contextlib.ExitStack
    source: OpenSource
    update: WeightUpdate
    drafts: Sequence[WeightUpdate]

    def write(self) -> None:
        """Writes everything. Tensors of draft heads that come in a stream are kept until the end of
        the stream."""
        stream, kept = self.source.stream, dict[str, Tensor]()
        if stream is not None and self.drafts:
            names = {name for draft in self.drafts for name in draft.stored_names}
            stream = _keeping(stream, names, kept)
        self.update.write(stream)
        for draft in self.drafts:
            draft.write(None if stream is None else kept.items())

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(self.update.names, *(draft.names for draft in self.drafts))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.update, *self.drafts))


class UpdateHook(HostHook):
    """Carries out the commands of a plan's entry before the body of its step.

    Attributes:
        outcomes: on the first rank, outcomes of commands that the loop has not taken yet.
        local: tensors of this process that updates bring, by the number of their `LocalSource`.
        drafts: number of further models with weights of their own.
    """

    entries = frozenset({ENTRY})

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._threads: dict[int, Future[Any]] = {}
        """Work in threads, by the number that the loop gave it."""
        self._groups: dict[str, BroadcastGroup] = {}
        self.outcomes: list[CommandOutcome] = []
        self.local: dict[int, Mapping[str, Tensor]] = {}
        self._heads: list[tuple[DraftHead, Family]] = []
        """Draft heads whose weights are in the model's checkpoint, with the names there."""
        self.drafts = 0
        self._model: Decoder
        self._weights: ReleasableMemory
        self._kv: ReleasableMemory
        self._cache: KVCache

    def attach(self, model: Decoder) -> None:
        self._model = model

    def take_memory(
        self,
        weights: ReleasableMemory,
        kv: ReleasableMemory,
        cache: KVCache,
        models: Sequence[DecoderLayers],
    ) -> None:
        self._weights, self._kv, self._cache = weights, kv, cache
        self.drafts = len(models) - 1
        heads = [each for each in models if isinstance(each, DraftHead)]
        self._heads = [(head, head.family) for head in heads if head.family is not None]

    def begin(self, step: Step) -> None:
        if ENTRY in step.plan.writes:
            for line in step.plan.writes[ENTRY][1]:
                outcome = self._run(decode(line))
                if not global_rank():
                    self.outcomes.append(outcome)

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {UPDATES: lambda _: self}

    def close(self) -> None:
        for number in list(self._threads):
            self.drop(number)
        self._groups.clear()

    # -- commands ------------------------------------------------------------------------------

    def _run(self, command: Command) -> CommandOutcome:
        """Carries out a command. Its error is that of any rank."""
        begun, size, error = time.monotonic(), 0, None
        try:
            size = self._obey(command)
        except Exception as failure:
            error = failure if isinstance(failure, QuireError) else _unexpected(failure)
        failed = torch.tensor(float(error is not None), device=self._device)
        if float(sum_over_all_ranks(failed)) and error is None:
            error = QuireError("another rank has failed; its log has the error")
        elif error is not None and global_rank():
            _log.error("rank %d: %s", global_rank(), error)
        return CommandOutcome(error, time.monotonic() - begun, size)

    def _obey(self, command: Command) -> int:
        """Carries out a command on this rank. Returns the bytes that it wrote or gave up."""
        match command:
            case Prepare(number, source, whole):
                self.prepare(number, source, whole=whole)
            case AwaitThread(number):
                self._threads[number].result()
            case Write(number):
                return self._write(number)
            case Drop(number):
                self.drop(number)
            case Join(number, group):
                self.join(number, group)
            case LeaveGroup(group):
                if self._groups.pop(group, None) is None:
                    raise QuireError(f"this engine has not joined a group {group!r}")
            case Release(level, tags):
                return self._release(level, tags)
            case Restore(tags, read):
                self._restore(tags, read=read)
        return 0

    def prepare(self, number: int, source: Source, *, whole: bool) -> Future[_Prepared]:
        """Opens a source and checks it in a thread, unless that has begun already."""
        return self._begin(number, functools.partial(self._open, source, whole=whole))

    def join(self, number: int, group: JoinGroup) -> Future[None]:
        """Joins a trainer's group in a thread, unless that has begun already."""
        return self._begin(number, functools.partial(self._join, group))

    def _begin(self, number: int, work: Callable[[], Any]) -> Future[Any]:
        """Begins work in a thread, unless work of that number has begun already."""
        if number not in self._threads:
            ready: Future[Any] = Future()
            self._threads[number] = ready

            def run() -> None:
                try:
                    # A thread begins on the first device, which "cuda" without an index means.
                    if self._device.index is not None:
                        torch.cuda.set_device(self._device)
                    ready.set_result(work())
                except BaseException as error:
                    ready.set_exception(error)

            threading.Thread(target=run, daemon=True, name="weight-update").start()
        return self._threads[number]

    def _join(self, group: JoinGroup) -> None:
        rank = group.rank_offset + global_rank()
        self._groups[group.group] = BroadcastGroup(group, rank, self._device)

    def _open(self, source: Source, *, whole: bool) -> _Prepared:
        if self._config.args.redundant_experts:
            raise ConfigError(
                "weights cannot be updated with redundant_experts, whose copies move between ranks",
                "redundant_experts",
            )
        stored = (layer for layer in self._cache.layers if isinstance(layer, KVLayer))
        fixed = any(layer.format.scales == "head" for layer in stored)
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(
                open_source(source, self._device, self._groups, self.local)
            )
            update = WeightUpdate(self._model, opened.files, whole=whole, fixed_scales=fixed)
            drafts = [
                WeightUpdate(head, opened.files, family=family)
                for head, family in self._heads
                if has_tensors_of(head, family, opened.files)
            ]
            return _Prepared(stack.pop_all(), opened, update, drafts)

    def _write(self, number: int) -> int:
        prepared: _Prepared = self._threads.pop(number).result()
        with prepared.stack:
            prepared.write()
            if self._device.type == "cuda":
                # Copies read the source's memory, which is closed next.
                torch.cuda.synchronize(self._device)
        return prepared.nbytes

    def drop(self, number: int) -> None:
        """Closes the source of an update that will not be written. Idempotent."""
        prepared = self._threads.pop(number, None)
        if prepared is not None:
            prepared.add_done_callback(_close)

    # -- sleep ---------------------------------------------------------------------------------

    def _release(self, level: int, tags: Sequence[str]) -> int:
        total = 0
        if "weights" in tags:
            dropped = list(self._model.parameters()) if level > 1 else []
            total += self._weights.release([each.data for each in dropped])
        if "kv" in tags:
            groups = range(len(self._cache.groups))
            total += self._kv.release([t for g in groups for t in self._cache.block_tensors(g)])
        return total

    def _restore(self, tags: Sequence[str], *, read: bool) -> None:
        if "weights" in tags:
            self._weights.restore()
        if "kv" in tags:
            self._kv.restore()
        if "weights" in tags and read:
            args = self._config.args
            reload_weights(self._model, self._config.model_path, args.load_format, args.seed)


def _keeping(
    stream: Iterator[tuple[str, Tensor]], names: Collection[str], kept: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields a stream's tensors, and puts copies of those with some names into `kept`."""
    for name, tensor in stream:
        if name in names:
            kept[name] = tensor.clone()
        yield name, tensor


def _close(done: Future[Any]) -> None:
    if done.exception() is None and isinstance(prepared := done.result(), _Prepared):
        prepared.stack.close()


def _unexpected(error: Exception) -> QuireError:
    return QuireError(f"{type(error).__name__}: {error}")
