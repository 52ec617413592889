"""A request in the scheduler: its tokens, three counts, and its status."""

from __future__ import annotations

import enum
from typing import TypedDict

import numpy as np

from quire.arrays import Int32
from quire.outputs import RequestTimes
from quire.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    WAITING = 0
    """Queued; holds no lane and no blocks."""
    PARKED = 1
    """Waits for a feature, or for a sibling's prompt, until `wake` queues it."""
    RUNNING = 2
    """Holds a lane and blocks."""
    FINISHED = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Request` that the engine passes on unread."""

    priority: int
    cache_salt: str
    pooling: str | None
    tenant: str
    share: float
    adapter: str
    cache_ids: Int32


class TokenBuffer:
    """A request's tokens.

    While the request runs, they lie in the scheduler's arrays (`move`). So the scheduler appends a
    token to each of many requests with one numpy operation.

    Args:
        tokens: int32 [n].
        count: int32 [1], memory for their number.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, tokens: Int32, count: Int32) -> None:
        self._data: Int32 = np.array(tokens, dtype=np.int32)
        self._count = count
        count[0] = len(tokens)

    def __len__(self) -> int:
        return int(self._count[0])

    def move(self, data: Int32, count: Int32) -> None:
        """Moves the tokens to `data`, int32 [room], and their number to `count`, int32 [1]."""
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
    """One completion that an engine generates. A prompt with `n` completions is `n` requests.

    While `planned < known` the host knows the tokens to compute: the prompt, or all tokens after a
    preemption. Once the last known token is planned, the request is `generating`, and only the
    device knows its position.

    While a request runs, its tokens and counts lie in the scheduler's arrays (`bind`), so that one
    operation changes many requests.

    Attributes:
        known: number of tokens on the host: prompt and confirmed output.
        planned: upper bound of the computed positions after every launched step.
        computed: number of positions with confirmed KV.
        max_total: most tokens, prompt included.
        priority: lower runs first, as in vLLM.
        arrival: time of its arrival, in seconds.
        order: its number by arrival, from the scheduler. It breaks ties of `arrival`.
        tenant: its API key.
        share: the tenant's weight in sharing the engine, > 0.
        charged: number of tokens charged to its tenant.
        leader: the sibling that computes their shared prompt (n > 1), or None.
        adapter: name of its LoRA adapter, or "".
        prompt: int32 [prompt_len], the prompt as the model reads it, or None if `tokens` has it.
        lora_id: stands for the adapter's contents; 0 without one. Set before the request is queued.
        weights: id of the weights at its start, or "" for those that the engine began with. While
            it waits, the id of the present weights.
        mixed: whether its KV was computed with several weights. No other request may use such KV.
        version_runs: pairs (version, tokens): how many of its tokens came from each version of the
            weights, without those of the present version while it runs.
        pooling: what becomes of its prompt in place of tokens: a `Pooling`, "classes" or "tokens";
            None for a request that generates.
        times: times of its events, recorded by the engine.
        lane_epoch: `Admit.lane_epoch` of its lane, while it has one.
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
        "mixed",
        "num_cached_tokens",
        "num_preemptions",
        "order",
        "params",
        "pooling",
        "priority",
        "prompt",
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
        "version_runs",
        "weights",
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
        pooling: str | None = None,
        tenant: str = "",
        share: float = 1.0,
        adapter: str = "",
        cache_ids: Int32 | None = None,
    ) -> None:
        self.request_id = request_id
        self._counts: Int32 = np.zeros(3, dtype=np.int32)
        self.tokens = TokenBuffer(prompt if cache_ids is None else cache_ids, self._counts[:1])
        self.prompt = None if cache_ids is None else prompt
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
        self.weights = ""
        self.mixed = False
        self.version_runs: list[tuple[int, int]] = []
        self.cache_salt = cache_salt
        self.pooling: str | None = pooling
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
        """Moves the tokens to `row`, int32 [>= max_total], and the counts to `counts`, int32 [3].

        The request then changes when these arrays do.
        """
        counts[:] = self._counts
        self._counts = counts
        self.tokens.move(row, counts[:1])

    def unbind(self) -> None:
        """Moves tokens and counts back to arrays of its own."""
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
    def namespace(self) -> tuple[int, str] | tuple[int, str, str]:
        """Requests share KV of equal tokens only if their namespaces are equal."""
        if self.weights:
            return self.lora_id, self.cache_salt, self.weights
        return self.lora_id, self.cache_salt

    def end_version(self, version: int) -> None:
        """Records that the tokens since the last call came from a version of the weights."""
        self.version_runs = [run for run in self.runs_until(version) if run[1]]

    def runs_until(self, version: int) -> list[tuple[int, int]]:
        """Returns pairs (version, tokens) for all of its tokens, the last of `version`."""
        count = self.num_output_tokens - sum(tokens for _, tokens in self.version_runs)
        return [*self.version_runs, (version, count)]

    def as_read(self, tokens: Int32) -> Int32:
        """Returns the request's first tokens as the model reads them.

        The KV cache may know positions of the prompt by other ids (`cache_ids`), because tokens
        alone do not tell what they stand for.

        Args:
            tokens: int32 [n], from `self.tokens`.
        """
        if self.prompt is None:
            return tokens
        return np.concatenate([self.prompt[: len(tokens)], tokens[self.prompt_len :]])

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
