"""Whether to copy a block or to compute it again."""

from __future__ import annotations

from dataclasses import dataclass

_LOAD_RATE = 1e9
"""Bytes per second that files are thought to be read at, until some were."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates measured when the engine started.

    prefill: tokens of a prompt that the device computes per second. out, into: bytes per second
    that cross from the device to the host, and back. latency: seconds that the smallest transfer
    takes, from its plan to the news of its end.
    """

    prefill: float
    out: float
    into: float
    latency: float


class CostModel:
    """Seconds of a copy against seconds of the computation that it saves.

    A copy is reckoned as if nothing else went on meanwhile, although others compute beside it. That
    errs towards computing, by at most what a copy costs, and keeps a request from waiting longer
    for its blocks than for its tokens.
    """

    def __init__(self, rates: Rates, token_bytes: float, state_bytes: float = 0.0) -> None:
        """token_bytes: of a token's KV. state_bytes: of a request's recurrent states."""
        self.rates = rates
        self._compute = 1.0 / rates.prefill
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._load_rate = _LOAD_RATE

    @property
    def worth_keeping(self) -> bool:
        """Whether blocks are worth the host's memory at all: a long prefix comes back sooner than
        it is computed."""
        return self._token_bytes / self.rates.into < self._compute

    def state_worth_keeping(self, saves: int) -> bool:
        """Whether a state that spares so many tokens comes back sooner than they are computed."""
        return self._state_bytes / self.rates.into < saves * self._compute

    def fetch_pays(self, tokens: int, size: int, of_files: int = 0) -> bool:
        """Returns whether bringing blocks back is faster than computing their tokens.

        It compares bytes / rate + latency with tokens / prefill rate.

        Args:
            tokens: Tokens that need no prefill then.
            size: Bytes to copy to the device.
            of_files: Number of these bytes to read from files first.
        """
        cost = size / self.rates.into + self.rates.latency
        if of_files:
            cost += of_files / self._load_rate
            # What is never tried is never measured again: a slow spell is forgotten in time.
            self._load_rate *= 1.01
        return cost < tokens * self._compute

    def observe_load(self, size: int, seconds: float) -> None:
        """Reading `size` bytes from files took that long."""
        self._load_rate += 0.2 * (size / max(seconds, 1e-6) - self._load_rate)

    def swap_pays(self, tokens: int) -> bool:
        """Moving a preempted request's blocks and states out, and in again when it resumes."""
        size = tokens * self._token_bytes + self._state_bytes
        both = size * (1.0 / self.rates.out + 1.0 / self.rates.into)
        return both + 2 * self.rates.latency < tokens * self._compute
