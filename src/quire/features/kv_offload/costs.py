"""Decides whether to copy a block or to compute it again."""

from __future__ import annotations

from dataclasses import dataclass

_LOAD_RATE = 1e9
"""Assumed read rate of files, in bytes per second, until it is measured."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates measured when the engine started.

    Attributes:
        prefill: prompt tokens that the device computes per second.
        out: bytes per second from the device to the host.
        into: bytes per second from the host to the device.
        latency: seconds of the smallest transfer, from its plan until the scheduler learns of its
            end.
    """

    prefill: float
    out: float
    into: float
    latency: float


class CostModel:
    """Compares the time of a copy with the time of the computation that it saves.

    The model counts the whole time of a copy, although other requests compute meanwhile. So it
    sometimes prefers computing where a copy would be cheaper. But no request waits longer for its
    blocks than it would for computing them.
    """

    def __init__(self, rates: Rates, token_bytes: float, state_bytes: float = 0.0) -> None:
        """Takes the sizes in bytes of a token's KV and of a request's recurrent states."""
        self.rates = rates
        self._compute = 1.0 / rates.prefill
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._load_rate = _LOAD_RATE

    @property
    def worth_keeping(self) -> bool:
        """Whether it pays to keep blocks on the host: copying a long prefix back is faster than
        computing it."""
        return self._token_bytes / self.rates.into < self._compute

    def state_worth_keeping(self, saves: int) -> bool:
        """Returns whether copying a state back is faster than computing the `saves` tokens that it
        saves."""
        return self._state_bytes / self.rates.into < saves * self._compute

    def fetch_pays(self, tokens: int, size: int, of_files: int = 0) -> bool:
        """Returns whether bringing blocks back is faster than computing their tokens.

        It compares bytes / rate + latency with tokens / prefill rate.

        Args:
            tokens: Tokens whose prefill the blocks would save.
            size: Bytes to copy to the device.
            of_files: Number of these bytes to read from files first.
        """
        cost = size / self.rates.into + self.rates.latency
        if of_files:
            cost += of_files / self._load_rate
            # The estimate grows with each query. Otherwise one slow read could rule out all further
            # reads, and the rate would never be measured again.
            self._load_rate *= 1.01
        return cost < tokens * self._compute

    def observe_load(self, size: int, seconds: float) -> None:
        """Records that reading `size` bytes from files took `seconds`."""
        self._load_rate += 0.2 * (size / max(seconds, 1e-6) - self._load_rate)

    def swap_pays(self, tokens: int) -> bool:
        """Returns whether moving a preempted request's blocks and states to the host and back is
        faster than computing them again."""
        size = tokens * self._token_bytes + self._state_bytes
        both = size * (1.0 / self.rates.out + 1.0 / self.rates.into)
        return both + 2 * self.rates.latency < tokens * self._compute
