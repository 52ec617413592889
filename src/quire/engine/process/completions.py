"""The completions of all clients by lane, and a step's outputs for each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.engine.loop.messages import CompletionEnd, CompletionStart, StepOutputs
from quire.engine.process.connection import Connection
from quire.request import Request
from quire.scheduler import RequestProgress, StepProgress
from quire.scheduler.progress import ENTRIES

_NOBODY = -1
"""The client number of a lane whose request belongs to no client."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(slots=True, eq=False)
class Client:
    """A client of the engine.

    Attributes:
        number: unique among the engine's clients.
        handles: maps handles of running requests to their number of unfinished completions.
    """

    connection: Connection
    number: int
    handles: dict[int, int] = field(default_factory=dict)

    def request(self, handle: int) -> str:
        return f"{self.number}.{handle}"


@dataclass(slots=True)
class Completion:
    """An unfinished completion. reported: whether its client has received its first outputs."""

    client: Client
    handle: int
    sample_index: int
    reported: bool = False


class CompletionTable:
    """Finds the client and handle of each row of a step by its lane, in arrays.

    A lane's columns are set when a prompt row of its request has run, and every request begins
    with a prompt row. Therefore decode steps need no Python work per row.
    """

    def __init__(self, num_lanes: int) -> None:
        self._by_id: dict[str, Completion] = {}
        self._handles: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._clients: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._reported: Mask = np.zeros(num_lanes, dtype=bool)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, client: Client, handle: int, requests: list[Request]) -> None:
        """Adds the completions of a request, whose handles begin with `handle`."""
        for index, request in enumerate(requests):
            self._by_id[request.request_id] = Completion(client, handle + index, index)
        client.handles[handle] = len(requests)

    def end(self, request: Request) -> Completion | None:
        """Removes a completion that has ended; returns None for a request of no client."""
        completion = self._by_id.pop(request.request_id, None)
        if completion is None:
            return None
        handles, handle = completion.client.handles, completion.handle - completion.sample_index
        left = handles.get(handle, 1) - 1
        if left:
            handles[handle] = left
        else:
            handles.pop(handle, None)
        return completion

    def outputs(
        self, progress: StepProgress, clients: Iterable[Client]
    ) -> Iterator[tuple[Client, StepOutputs]]:
        """Yields each client that gets outputs of a step, with its outputs."""
        if not len(progress):
            return
        for place in range(progress.num_generating, len(progress)):
            self._enter(progress.lanes[place], progress.requests[place])
        numbers = self._clients[progress.lanes]
        shown = progress.n_tokens > 0
        shown[progress.finished] = True
        extras = _extras(progress)
        for client in clients:
            own = numbers == client.number
            message = self._message(progress, np.flatnonzero(own & shown), own, extras)
            if len(message.handles) or message.prompt_logprobs or message.experts:
                yield client, message
        for place in progress.finished:
            self.end(progress.requests[place])

    def _enter(self, lane: np.int32, request: Request) -> None:
        completion = self._by_id.get(request.request_id)
        if completion is None:  # The engine computes the request for a peer.
            self._clients[lane] = _NOBODY
            return
        self._handles[lane] = completion.handle
        self._clients[lane] = completion.client.number
        self._reported[lane] = completion.reported

    def _message(
        self,
        progress: StepProgress,
        places: np.ndarray[Any, np.dtype[np.intp]],
        own: Mask,
        extras: dict[str, list[tuple[int, Any]]],
    ) -> StepOutputs:
        """Returns one client's outputs.

        Args:
            places: the client's rows that have tokens or end.
            own: mask of the client's rows.
        """
        lanes, counts = progress.lanes[places], progress.n_tokens[places]
        handles = self._handles[lanes]
        width = np.arange(progress.tokens.shape[1])
        message = StepOutputs(
            handles=handles,
            counts=counts,
            tokens=progress.tokens[places][width < counts[:, None]],
            starts=[
                self._start(progress.requests[places[i]], int(handles[i]))
                for i in np.flatnonzero(~self._reported[lanes]).tolist()
            ],
            ends=[self._ended(progress, place) for place in progress.finished if own[place]],
            version=progress.version,
        )
        self._reported[lanes] = True
        for name, parts in extras.items():
            found = [
                (int(self._handles[progress.lanes[place]]), part)
                for place, part in parts
                if own[place]
            ]
            setattr(message, name, found)
        return message

    def _start(self, request: Request, handle: int) -> CompletionStart:
        self._by_id[request.request_id].reported = True
        times = request.times
        return CompletionStart(handle, request.num_cached_tokens, times.queued, times.delays)

    def _ended(self, progress: StepProgress, place: int) -> CompletionEnd:
        one = progress[place]
        handle = int(self._handles[progress.lanes[place]])
        reason = str(one.request.finish_reason or "error")
        return CompletionEnd(handle, reason, one.stop_token, one.request.times.delays)


def _extras(progress: StepProgress) -> dict[str, list[tuple[int, Any]]]:
    """Returns a step's entries and vectors by field, each with its row."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for name in (*ENTRIES, "pooled"):
        of_rows = getattr(progress, name)
        if of_rows is None:
            continue
        places = np.flatnonzero(np.isin(progress.rows, of_rows.rows)).tolist()
        items: list[tuple[int, RequestProgress]] = [(place, progress[place]) for place in places]
        found[name] = [(place, getattr(item, name)) for place, item in items]
    return found
