"""Counts the tokens that a hybrid takes from the cache, against a model of attention only.

    python bench/hybrid_prefixes.py                                     # print a table
    python bench/hybrid_prefixes.py --output bench/results/hybrid_prefixes.jsonl

The scheduler and the cache are the engine's. The device is the tests' fake. It checks the origin of
every block and state that a step reads. The four traces:

- questions after one prefix
- the same after a prefix that loses its last 100 tokens
- conversations
- conversations in which the next prompt omits the beginning of an answer (thoughts)

Each runs with ample room, with a third of the device's blocks and states, and with this third and a
host tier for the rest. Both kinds of model have the same KV blocks. Copies cost nothing here, so
the reuse depends only on the kept blocks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.features.kv_offload.costs import CostModel, Rates
from quire.features.kv_offload.feature import OffloadFeature
from quire.features.kv_offload.tiers import GroupTier
from quire.plan import KVGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Scheduler
from quire.tools.bench.record import make_record
from tables import print_and_append
from tests.fakes import FakeExecutor

FULL = KVGroup(layers=(0,), tokens_per_block=16)
STATE = KVGroup(layers=(1,), kind="state", tokens_per_block=16)
VOCAB = 5000
LONGEST = 8192
LANES = 8
AMPLE = 20_000
"""Blocks that no trace fills."""

Turn = tuple[list[int], int]
"""A prompt, and how many tokens are generated."""
Trace = Callable[["Served", random.Random], None]


@dataclass(frozen=True)
class Room:
    """Blocks and states on the device and on the host. Attention alone has no states."""

    blocks: int = AMPLE
    states: int = 0
    host_blocks: int = 0
    host_states: int = 0


class Served:
    """A scheduler over a trace, and the tokens that it took from the cache."""

    def __init__(self, room: Room) -> None:
        groups, counts, host = [FULL], [room.blocks], [room.host_blocks]
        if room.states:
            groups, counts, host = [FULL, STATE], [*counts, room.states], [*host, room.host_states]
        features: list[Feature] = []
        if room.host_blocks:
            free = CostModel(Rates(prefill=1.0, out=1e12, into=1e12, latency=0.0), 1.0, 1.0)
            tiers = [
                GroupTier(index, slots, 1, state=group.kind == "state")
                for index, (group, slots) in enumerate(zip(groups, host, strict=True))
            ]
            features.append(OffloadFeature(tiers, free))
        self.executor = FakeExecutor(
            groups, counts, vocab=VOCAB, host_blocks=host if room.host_blocks else ()
        )
        config = SchedulerConfig(
            max_num_seqs=LANES,
            max_num_batched_tokens=1024,
            max_model_len=LONGEST,
            steps_in_flight=2,
        )
        self.scheduler = Scheduler(config, self.executor.start(), features)
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

    @property
    def cached(self) -> list[int]:
        """Blocks of each group that are kept."""
        return self.scheduler.stats().blocks_cached


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


def plain(trace: Callable[[random.Random], Iterator[Turn]]) -> Trace:
    def run(served: Served, draw: random.Random) -> None:
        for turn in trace(draw):
            served.run(turn)

    return run


TRACES: dict[str, Trace] = {
    "shared prefix": plain(shared_prefix),
    "shortened prefix": plain(shortened_prefix),
    "conversations": conversations,
    "conversations without their thoughts": forgetful,
}


def served(trace: Trace, room: Room, seed: int = 5) -> Served:
    """Returns a scheduler that has run a trace."""
    found = Served(room)
    trace(found, random.Random(seed))
    return found


def rooms(trace: Trace) -> dict[str, tuple[Room, Room]]:
    """Returns what a trace runs with: for attention only, and with states."""
    needed = served(trace, Room(states=AMPLE)).cached
    blocks, states = (-(-count // 3) for count in needed)
    longest = -(-3000 // FULL.tokens_per_block)
    blocks, states = max(blocks, longest), max(states, 2)
    host_blocks, host_states = needed
    return {
        "all": (Room(), Room(states=needed[1] + LANES)),
        "a third": (Room(blocks), Room(blocks, states)),
        "a third, and a host tier": (
            Room(blocks, 0, host_blocks),
            Room(blocks, states, host_blocks, host_states),
        ),
    }


def measure(name: str) -> dict[str, dict[str, float]]:
    """Returns the figures of a trace, by the room that it had."""
    found = {}
    for what, (attention, hybrid) in rooms(TRACES[name]).items():
        one, other = served(TRACES[name], attention), served(TRACES[name], hybrid)
        found[what] = {
            "attention_tokens": one.reused,
            "hybrid_tokens": other.reused,
            "share": round(other.reused / one.reused, 4) if one.reused else 1.0,
            "blocks": hybrid.blocks,
            "states": hybrid.states,
            "host_states": hybrid.host_states,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a JSONL file to append records to")
    args = parser.parse_args()
    records = [
        make_record(f"hybrid prefixes, {name}, {room}", metrics)
        for name in TRACES
        for room, metrics in measure(name).items()
    ]
    print_and_append(records, args.output)


if __name__ == "__main__":
    main()
