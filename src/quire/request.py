"""A request as the brain sees it: its tokens, three counts, and its status."""

from __future__ import annotations

import enum
from typing import TypedDict

import numpy as np

from quire.arrays import Int32
from quire.outputs import RequestTimes
from quire.pooling_params import Pooling
from quire.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    WAITING = 0
    """Queued, holding nothing."""
    PARKED = 1
    """A feature is not ready for it, or it waits for a sibling's prompt; `wake` queues it."""
    RUNNING = 2
    """Holds a lane and blocks."""
    FINISHED = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Request` that pass through the engine unread."""

    priority: int
    cache_salt: str
    pooling: Pooling | None
    tenant: str
    share: float
    adapter: str


class TokenBuffer:
    """A request's tokens. Who has taken them over by `move` appends to them in bulk: a scheduler
    that gives many requests a token each writes them with one numpy operation.

    count: int32 [1], keeps their number.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, tokens: Int32, count: Int32) -> None:
        self._data: Int32 = np.array(tokens, dtype=np.int32)
        self._count = count
        count[0] = len(tokens)

    def __len__(self) -> int:
        return int(self._count[0])

    def move(self, data: Int32, count: Int32) -> None:
        """Continues in `data`, int32 [room], with the length in `count`, int32 [1]."""
        n = int(self._count[0])
        data[:n] = self._data[:n]
        count[0] = n
        self._data, self._count = data, count

    def view(self, start: int = 0, stop: int | None = None) -> Int32:
        """Returns a read-only view, valid until the next move."""
        n = int(self._count[0])
        out = self._data[start : n if stop is None else min(stop, n)]
        out.flags.writeable = False
        return out


class Request:
    """One completion in the making (`n` completions are `n` requests).

    Counts, all in tokens:
        known: tokens the host has read (prompt and confirmed output).
        planned: upper bound of the positions computed once every launched step has run.
        computed: positions whose KV is confirmed.
    While `planned < known` the host owns the positions (the prompt, or a resumption); once the last
    known token is planned the request is `generating` and the device owns them.
    While a request runs, its tokens and counts lie in the scheduler's arrays (`bind`), which change
    many requests at once; they read the same from here.

    Attributes:
        max_total: length, prompt included, at which it must end.
        priority: lower runs first, as in vLLM.
        arrival: seconds; ties are broken by `order`, which the scheduler assigns.
        tenant: the API key that it runs for; tenants share the engine by their `share`, > 0.
        charged: tokens that its tenant has been charged for.
        leader: the sibling whose prompt this one shares (n > 1), or None.
        adapter: name of the LoRA adapter that it runs with, "" for none. lora_id: stands for the
            adapter's contents, 0 for none; set before the request is queued.
        pooling: how its prompt becomes one vector in place of tokens, or None.
        times: when it moved on; kept by the engine.
        lane_epoch: its lane's, while it has one (`Admit.lane_epoch`).
    """

    __slots__ = (
        "_counts",
        "adapter",
        "arrival",
        "cache_salt",
        "charged",
        "finish_reason",
        "generating",
        "lane",
        "lane_epoch",
        "leader",
        "lora_id",
        "max_total",
        "num_cached_tokens",
        "num_preemptions",
        "order",
        "params",
        "pooling",
        "priority",
        "prompt_len",
        "prompt_logprobs_done",
        "request_id",
        "sample_index",
        "seed",
        "share",
        "status",
        "tenant",
        "times",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Int32,
        params: SamplingParams,
        *,
        max_total: int,
        arrival: float = 0.0,
        priority: int = 0,
        seed: int = 0,
        sample_index: int = 0,
        leader: Request | None = None,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        tenant: str = "",
        share: float = 1.0,
        adapter: str = "",
    ) -> None:
        self.request_id = request_id
        self._counts: Int32 = np.zeros(3, dtype=np.int32)
        self.tokens = TokenBuffer(prompt, self._counts[:1])
        self.prompt_len = len(prompt)
        self.params = params
        self.max_total = max_total
        self.arrival = arrival
        self.order = 0
        self.priority = priority
        self.seed = seed
        self.sample_index = sample_index
        self.leader = leader
        self.adapter = adapter
        self.lora_id = 0
        self.cache_salt = cache_salt
        self.pooling: Pooling | None = pooling
        self.times = RequestTimes(arrival)
        self.tenant = tenant
        self.share = share
        self.charged = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.lane = -1
        self.lane_epoch = 0
        self.generating = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs_done = 0

    def bind(self, row: Int32, counts: Int32) -> None:
        """Keeps tokens in `row`, int32 [>= max_total], and counts in `counts`, int32 [3]."""
        counts[:] = self._counts
        self._counts = counts
        self.tokens.move(row, counts[:1])

    def unbind(self) -> None:
        """Takes tokens and counts back into arrays of its own."""
        self.bind(np.empty(len(self.tokens), dtype=np.int32), np.empty(3, dtype=np.int32))

    @property
    def known(self) -> int:
        return int(self._counts[0])

    @property
    def planned(self) -> int:
        return int(self._counts[1])

    @planned.setter
    def planned(self, value: int) -> None:
        self._counts[1] = value

    @property
    def computed(self) -> int:
        return int(self._counts[2])

    @computed.setter
    def computed(self, value: int) -> None:
        self._counts[2] = value

    @property
    def namespace(self) -> tuple[int, str]:
        """Equal, besides the tokens, for requests that may share KV."""
        return self.lora_id, self.cache_salt

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def output(self) -> Int32:
        """Tokens after the prompt, int32 [num_output_tokens]."""
        return self.tokens.view(self.prompt_len)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, known={self.known}, "
            f"planned={self.planned}, computed={self.computed})"
        )
