"""The choice of replicas for a request: which one answers it, and which one computes its prompt.

The policy `prefix` compares the options by cost, in seconds. The cost of an option is the time
until the request's prompt is computed. If the answering replica computes the prompt, its delay of
every request that decodes there is added.

A short prompt, or one whose KV is mostly cached, is therefore computed on the replica that answers.
A long prompt is computed on a prefill replica, if the handover costs less than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from quire.engine.process.placement import RUNNING_TOKENS, Placement
from quire.errors import ConfigError
from quire.router.prefixes import KnownPrompt, PrefixMap
from quire.router.prompts import Prompt
from quire.router.replica import ReplicaState

RoutePolicy = Literal["prefix", "least-loaded", "round-robin"]

_UNKNOWN_RATE = 5000.0
"""Assumed prefill rate, in prompt tokens per second, until a replica has measured one."""

States = Mapping[int, ReplicaState]


def route_policy(name: str) -> RoutePolicy:
    """Returns the policy of this name.

    Raises:
        ConfigError: there is no such policy.
    """
    if name not in get_args(RoutePolicy):
        known = ", ".join(get_args(RoutePolicy))
        raise ConfigError(f"policy must be one of {known}, got {name!r}", "policy")
    return cast(RoutePolicy, name)


@dataclass(slots=True)
class RouteChoice:
    """The replicas that were chosen for a request.

    Attributes:
        index: number of the replica that answers.
        placements: the request's placement at the answering replica. If there is a prefill replica,
            the placement there comes second.
        prefill: name by which the answering replica knows the prefill replica. "" means that the
            answering replica computes the prompt itself; None leaves the decision to it.
    """

    index: int
    placements: tuple[Placement, ...]
    prefill: str | None = None

    def answered(self) -> None:
        """Records the first token, which also ends the work of the prefill replica. Idempotent."""
        for placement in self.placements:
            placement.answered()
        for placement in self.placements[1:]:
            placement.end()

    def end(self) -> None:
        """Records the end of the request. Idempotent."""
        for placement in self.placements:
            placement.end()


class Chooser:
    """Chooses replicas by a policy.

    Attributes:
        policy: how to choose.
        prefixes: maps beginnings of prompts to KV blocks.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        self.policy = policy
        self.prefixes = PrefixMap()
        self._turn = 0

    def choose(self, prompt: Prompt, candidates: States) -> RouteChoice:
        """Returns the replicas for a request with this prompt.

        Args:
            candidates: the replicas that can take the request, by number; at least one.
        """
        self._turn += 1
        answerers = {
            n: state for n, state in candidates.items() if state.role != "prefill"
        } or candidates
        if self.policy != "prefix":
            index = self._next_in_turn(answerers)
            return RouteChoice(index, (Placement(candidates[index], index, prompt.size // 4),))
        known = self.prefixes.look_up(prompt)
        # The prompt's first key breaks ties. Several routers thus send prompts with the same
        # beginning to the same replica, although they do not know of each other.
        first = int.from_bytes(known.keys[0][:8]) if known.keys else self._turn
        if len(answerers) == len(candidates):
            return self._choose_one(known, candidates, first)
        return self._choose_pair(known, candidates, answerers, first)

    def _next_in_turn(self, candidates: States) -> int:
        turns = sorted(candidates)
        number = turns[self._turn % len(turns)]
        if self.policy == "least-loaded":
            ring = turns[-1] + 1
            number = min(candidates, key=lambda n: (candidates[n].busy, (n - self._turn) % ring))
        return number

    def _choose_one(self, prompt: KnownPrompt, candidates: States, first: int) -> RouteChoice:
        """Chooses one replica, which computes the prompt and answers."""
        rate, ring = mean_rate(candidates), max(candidates) + 1
        tokens = prompt.tokens
        best: tuple[float, int, int, int] | None = None
        for index, state in candidates.items():
            missing = tokens - state.held_tokens(prompt)
            work = missing + state.queued_tokens / 2 + RUNNING_TOKENS * state.busy
            seconds = work / (state.load.prefill_rate or rate)
            if best is None or seconds <= best[0]:
                cost = (seconds, (index - first) % ring, index, missing)
                best = cost if best is None else min(best, cost)
        if best is None:
            raise ValueError("there is no replica to choose")
        _, _, chosen, missing = best
        candidates[chosen].take(prompt.keys)
        return RouteChoice(chosen, (Placement(candidates[chosen], chosen, missing),))

    def _choose_pair(
        self, prompt: KnownPrompt, candidates: States, answerers: States, first: int
    ) -> RouteChoice:
        """Chooses the answering replica and the one that computes the prompt.

        They may be the same replica.
        """
        rate, ring = mean_rate(candidates), max(candidates) + 1
        prefillers = [
            (missing / (state.load.prefill_rate or rate) + queue_seconds(state, rate), missing, n)
            for n, state in candidates.items()
            if n not in answerers and state.grants
            for missing in (prompt.tokens - state.held_tokens(prompt),)
        ]
        prefillers.sort()
        options: list[tuple[float, int, int, int | None, int]] = []
        for index, state in answerers.items():
            order, own_rate = (index - first) % ring, state.load.prefill_rate or rate
            missing = prompt.tokens - state.held_tokens(prompt)
            seconds = missing / own_rate
            # The prompt delays every request that decodes on this replica by `seconds`.
            local = seconds + queue_seconds(state, rate) + seconds * state.busy
            options.append((local, order, index, None, missing))
            peer = next((each for each in prefillers if each[2] in state.peers), None)
            if peer is not None and missing:
                apart = (
                    peer[0]
                    + handover_seconds(state, missing)
                    + RUNNING_TOKENS * state.busy / own_rate
                )
                options.append((apart, order, index, peer[2], peer[1]))
        _, _, index, number, missing = min(options, key=lambda option: option[:2])
        candidates[index].take(prompt.keys)
        if number is None:
            prefill = "" if candidates[index].role == "decode" else None
            return RouteChoice(index, (Placement(candidates[index], index, missing),), prefill)
        candidates[number].take(prompt.keys)
        placements = (
            Placement(candidates[index], index, 0),
            Placement(candidates[number], number, missing),
        )
        return RouteChoice(index, placements, candidates[index].peers[number])


def mean_rate(states: States) -> float:
    """Returns the mean of the measured prefill rates, in tokens per second."""
    rates = [rate for state in states.values() if (rate := state.load.prefill_rate)]
    return sum(rates) / len(rates) if rates else _UNKNOWN_RATE


def queue_seconds(state: ReplicaState, rate: float) -> float:
    """Returns the seconds that a request is expected to wait at a replica.

    The estimate is the time for half of the queued prompt tokens, and for a few tokens of each
    running request. If all queued tokens counted, every burst would drive requests away from the
    replica that has their prefix.

    Args:
        rate: tokens per second to assume if the replica has measured no prefill rate.
    """
    tokens = state.queued_tokens / 2 + RUNNING_TOKENS * state.busy
    return tokens / (state.load.prefill_rate or rate)


def handover_seconds(state: ReplicaState, tokens: int) -> float:
    """Returns the seconds that a replica needs to receive a prompt's KV from another replica.

    Args:
        tokens: prompt tokens whose KV the replica does not have.
    """
    return state.load.handover_seconds + state.load.handover_token_seconds * tokens
