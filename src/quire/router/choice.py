"""The choice of replicas for a request: who answers it, and who computes its prompt.

The policy `prefix` compares costs, in seconds: for the request, until its prompt is computed where
it is answered, and for those that decode where a prompt is computed beside them, the time by which
that makes their next token late. So a short prompt, or one that is mostly held, is computed where
it is answered, and a long one apart, as long as the way there is shorter than what it spares.
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
"""Prompt tokens per second, as long as no replica has measured any."""

States = Mapping[int, ReplicaState]


def route_policy(name: str) -> RoutePolicy:
    """Returns the policy of a name. Raises ConfigError if there is none."""
    if name not in get_args(RoutePolicy):
        known = ", ".join(get_args(RoutePolicy))
        raise ConfigError(f"policy must be one of {known}, got {name!r}", "policy")
    return cast(RoutePolicy, name)


@dataclass(slots=True)
class RouteChoice:
    """A request's replicas.

    index: of the replica that answers. prefill: the name, there, of the one that computes the
    prompt, "" for none; None: that replica decides. placements: at both.
    """

    index: int
    placements: tuple[Placement, ...]
    prefill: str | None = None

    def answered(self) -> None:
        """Takes note of the first token. Idempotent."""
        for placement in self.placements:
            placement.answered()
        for placement in self.placements[1:]:
            placement.end()

    def end(self) -> None:
        """Takes note of the request's end. Idempotent."""
        for placement in self.placements:
            placement.end()


class Chooser:
    """Chooses by a policy. prefixes: what is known of prompts' blocks."""

    def __init__(self, policy: RoutePolicy) -> None:
        self.policy = policy
        self.prefixes = PrefixMap()
        self._turn = 0

    def choose(self, prompt: Prompt, able: States) -> RouteChoice:
        """Chooses for a prompt. able: by number, at least one."""
        self._turn += 1
        answering = {n: state for n, state in able.items() if state.role != "prefill"} or able
        if self.policy != "prefix":
            index = self._in_turn(answering)
            return RouteChoice(index, (Placement(able[index], index, prompt.size // 4),))
        known = self.prefixes.look_up(prompt)
        # Routers that know nothing of each other send equal beginnings to the same replica.
        first = int.from_bytes(known.keys[0][:8]) if known.keys else self._turn
        if len(answering) == len(able):
            return self._whole(known, able, first)
        return self._apart(known, able, answering, first)

    def _in_turn(self, able: States) -> int:
        turns = sorted(able)
        number = turns[self._turn % len(turns)]
        if self.policy == "least-loaded":
            around = turns[-1] + 1
            number = min(able, key=lambda n: (able[n].busy, (n - self._turn) % around))
        return number

    def _whole(self, prompt: KnownPrompt, able: States, first: int) -> RouteChoice:
        """Chooses one replica for all of a request."""
        rate, around = mean_rate(able), max(able) + 1
        tokens = prompt.tokens
        best: tuple[float, int, int, int] | None = None
        for index, state in able.items():
            lacks = tokens - state.held_tokens(prompt)
            work = lacks + state.queued_tokens / 2 + RUNNING_TOKENS * state.busy
            seconds = work / (state.load.prefill_rate or rate)
            if best is None or seconds <= best[0]:
                cost = (seconds, (index - first) % around, index, lacks)
                best = cost if best is None else min(best, cost)
        if best is None:
            raise ValueError("there is no replica to choose")
        _, _, chosen, lacks = best
        able[chosen].take(prompt.keys)
        return RouteChoice(chosen, (Placement(able[chosen], chosen, lacks),))

    def _apart(
        self, prompt: KnownPrompt, able: States, answering: States, first: int
    ) -> RouteChoice:
        """Chooses who answers and who computes the prompt, which may be the same."""
        rate, around = mean_rate(able), max(able) + 1
        computing = [
            (lacks / (state.load.prefill_rate or rate) + queue_seconds(state, rate), lacks, n)
            for n, state in able.items()
            if n not in answering and state.grants
            for lacks in (prompt.tokens - state.held_tokens(prompt),)
        ]
        computing.sort()
        options: list[tuple[float, int, int, int | None, int]] = []
        for index, state in answering.items():
            order, own_rate = (index - first) % around, state.load.prefill_rate or rate
            lacks = prompt.tokens - state.held_tokens(prompt)
            seconds = lacks / own_rate
            # All that decode here wait as long.
            local = seconds + queue_seconds(state, rate) + seconds * state.busy
            options.append((local, order, index, None, lacks))
            peer = next((each for each in computing if each[2] in state.peers), None)
            if peer is not None and lacks:
                apart = peer[0] + handover(state, lacks) + RUNNING_TOKENS * state.busy / own_rate
                options.append((apart, order, index, peer[2], peer[1]))
        _, _, index, number, lacks = min(options, key=lambda option: option[:2])
        able[index].take(prompt.keys)
        if number is None:
            prefill = "" if able[index].role == "decode" else None
            return RouteChoice(index, (Placement(able[index], index, lacks),), prefill)
        able[number].take(prompt.keys)
        placements = Placement(able[index], index, 0), Placement(able[number], number, lacks)
        return RouteChoice(index, placements, able[index].peers[number])


def mean_rate(states: States) -> float:
    """Returns the mean of the prefill rates that were measured."""
    rates = [rate for state in states.values() if (rate := state.load.prefill_rate)]
    return sum(rates) / len(rates) if rates else _UNKNOWN_RATE


def queue_seconds(state: ReplicaState, rate: float) -> float:
    """Returns what a request waits for at a replica, in seconds: half of the prompts there (more,
    and requests leave their prefixes at every burst), and a little for each request that runs.
    rate: where the replica's is not known."""
    tokens = state.queued_tokens / 2 + RUNNING_TOKENS * state.busy
    return tokens / (state.load.prefill_rate or rate)


def handover(state: ReplicaState, tokens: int) -> float:
    """Returns the seconds that a prompt from elsewhere costs a replica that lacks `tokens` of it,
    as it measured."""
    return state.load.handover_seconds + state.load.handover_token_seconds * tokens
