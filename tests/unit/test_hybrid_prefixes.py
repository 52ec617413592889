"""Tokens taken from the cache where there are recurrent states, against attention only: on traces
of shared and shortened prefixes and of conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.plan import KVGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler
from tests.fakes import FakeExecutor

FULL = KVGroup(layers=(0,), tokens_per_block=16)
STATE = KVGroup(layers=(1,), kind="state", tokens_per_block=16)
VOCAB = 5000
LONGEST = 8192

Turn = tuple[list[int], int]
"""A prompt, and how many tokens are generated."""
Trace = Callable[[random.Random], Iterator[Turn]]


class Served:
    """A scheduler over a trace, and the tokens that it took from the cache."""

    def __init__(self, states: int) -> None:
        groups, counts = [FULL], [20_000]
        if states:
            groups, counts = [FULL, STATE], [20_000, states]
        self.executor = FakeExecutor(groups, counts, vocab=VOCAB)
        config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=LONGEST, steps_in_flight=2
        )
        self.scheduler = Scheduler(config, self.executor.start())
        self.count = 0

    def run(self, turn: Turn) -> list[int]:
        """Returns the text after a turn."""
        self.count += 1
        name = f"r{self.count}"
        prompt, output = turn
        request = Request(name, int32(prompt), SamplingParams(), max_total=len(prompt) + output)
        self.scheduler.add(request)
        while self.scheduler.has_work():
            plan = self.scheduler.plan()
            if plan is None:
                self.scheduler.update(self.executor.collect())
            else:
                self.executor.submit(plan)
        return prompt + request.output.tolist()

    @property
    def reused(self) -> int:
        return self.scheduler.stats().prefix_hit_tokens


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1, VOCAB) for _ in range(count)]


def shared_prefix(draw: random.Random) -> Iterator[Turn]:
    """64 questions behind one system prompt."""
    system = tokens(draw, 2000)
    for _ in range(64):
        yield system + tokens(draw, draw.randint(20, 200)), 6


def shortened_prefix(draw: random.Random) -> Iterator[Turn]:
    """The system prompt loses its last 100 tokens after the first request, then stays."""
    system = tokens(draw, 2000)
    yield system + tokens(draw, 60), 6
    for _ in range(63):
        yield system[:-100] + tokens(draw, draw.randint(20, 200)), 6


def conversations(served: Served, draw: random.Random) -> None:
    """Turns of six users in turn; each prompt is all that was said before, and something new."""
    texts = [tokens(draw, 300) for _ in range(6)]
    for _ in range(6):
        for user, text in enumerate(texts):
            texts[user] = served.run((text + tokens(draw, draw.randint(10, 150)), 20))


def forgetful(served: Served, draw: random.Random) -> None:
    """Conversations whose answers begin with thoughts that the next prompt leaves out."""
    texts = [tokens(draw, 300) for _ in range(6)]
    for _ in range(6):
        for user, text in enumerate(texts):
            asked = text + tokens(draw, draw.randint(60, 150))
            said = served.run((asked, 40))
            texts[user] = asked + said[len(asked) + 25 :]


def plain(trace: Trace) -> Callable[[Served, random.Random], None]:
    def run(served: Served, draw: random.Random) -> None:
        for turn in trace(draw):
            served.run(turn)

    return run


TRACES: dict[str, tuple[Callable[[Served, random.Random], None], float]] = {
    "shared prefix": (plain(shared_prefix), 0.95),
    "shortened prefix": (plain(shortened_prefix), 0.95),
    "conversations": (conversations, 0.95),
    "conversations without their thoughts": (forgetful, 0.95),
}


@pytest.mark.parametrize("states", [200, 40])
@pytest.mark.parametrize("name", TRACES)
def test_reused_tokens(name: str, states: int) -> None:
    trace, bound = TRACES[name]
    attention, hybrid = Served(0), Served(states)
    trace(attention, random.Random(5))
    trace(hybrid, random.Random(5))
    assert attention.reused > 0
    assert hybrid.reused >= bound * attention.reused, hybrid.reused / attention.reused
