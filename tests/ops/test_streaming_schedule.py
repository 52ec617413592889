"""The schedule of bench/kernels/streaming_gates.py: programs in any order, and their boxes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "kernels"))

from shapes import QWEN3_0_6B
from streaming_gates import LAYER_BYTES, VARIANTS, gates, names_in_turn, table, work_of
from streaming_schedule import Exchange, Schedule, final_states, payload

from quire.tools.bench.record import BenchRecord

ALL_TO_ALL = (Exchange(16, 16, 2), Exchange(16, 16), Exchange(16, 16, 3))
WINDOWS = (Exchange(16, 16, 2), Exchange(32, 8), Exchange(64, 16, 3))


@dataclass
class Machine:
    """Memory that programs share.

    Attributes:
        words: the epoch and the payload of each word.
        states: the state of each program.
    """

    schedule: Schedule
    words: list[tuple[int, int]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words = [(0, 0)] * (2 * self.schedule.layer_words)
        self.states = [0] * self.schedule.programs


@dataclass
class Ring:
    """The boxes in a program's shared memory, by number."""

    stages: int
    filled: int = 0
    released: int = 0


def consumer(machine: Machine, program: int, ring: Ring) -> Iterator[bool]:
    """Runs a program's exchanges. Each step yields whether it got on."""
    plan = machine.schedule
    for layer in range(plan.layers):
        for which, own in enumerate(plan.exchanges):
            slot, epoch = plan.slot(layer, which), plan.epoch(0, layer, which)
            state = machine.states[program]
            for word in plan.sent(program, which):
                value = payload(np.array([state], np.uint32), np.array([word], np.uint32))
                machine.words[slot + word] = (epoch, int(value[0]))
                yield True
            total = 0
            for word in plan.received(program, which):
                while machine.words[slot + word][0] < epoch:
                    yield False
                found, value = machine.words[slot + word]
                assert found == epoch, "a word was overwritten before it was read"
                total += value
                yield True
            machine.states[program] = total % 2**32
            for _ in range(own.boxes):
                while ring.filled == ring.released:
                    yield False
                ring.released += 1
                yield True


def producer(plan: Schedule, ring: Ring) -> Iterator[bool]:
    """Copies a program's boxes."""
    for _ in range(plan.layers * sum(own.boxes for own in plan.exchanges)):
        while ring.filled == ring.released + ring.stages:
            yield False
        ring.filled += 1
        yield True


def run(plan: Schedule, stages: int, seed: int) -> list[int]:
    """Runs all programs in a random order, and returns their states."""
    draw = random.Random(seed)
    machine = Machine(plan)
    threads: list[Iterator[bool]] = []
    for program in range(plan.programs):
        ring = Ring(stages)
        threads += [consumer(machine, program, ring), producer(plan, ring)]
    idle = 0
    while threads:
        thread = draw.choice(threads)
        # A thread runs for long at times, so that others fall behind.
        for _ in range(draw.choice((1, 4, 200))):
            moved = next(thread, None)
            if moved is None:
                threads.remove(thread)
            idle = 0 if moved or moved is None else idle + 1
            if not moved:
                break
        assert idle < 5000, "the programs wait for each other"
    return machine.states


@pytest.mark.parametrize("exchanges", [ALL_TO_ALL, WINDOWS, ALL_TO_ALL[:1]])
@pytest.mark.parametrize("stages", [1, 4])
def test_any_order_gives_the_same_states(exchanges: tuple[Exchange, ...], stages: int) -> None:
    plan = Schedule(8, 5, exchanges)
    for seed in range(3):
        assert run(plan, stages, seed) == final_states(plan).tolist()


class OneBuffer(Schedule):
    def slot(self, layer: int, exchange: int) -> int:
        return super().slot(0, exchange)


def test_one_buffer_would_not_do() -> None:
    with pytest.raises(AssertionError, match="overwritten"):
        run(OneBuffer(8, 20, ALL_TO_ALL[:1]), 1, 0)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("ceiling")])
def test_variants_copy_each_layer_once(name: str) -> None:
    variant, work = VARIANTS[name], work_of(VARIANTS[name])
    boxes = sum(own.boxes for own in work.schedule.exchanges)
    assert boxes == sum(kind.count for kind in work.kinds)
    if work.kinds and not variant.short:
        whole = QWEN3_0_6B.layers * LAYER_BYTES
        # Programs that do not divide the boxes leave some out.
        assert whole - variant.programs * variant.box < work.bytes <= whole
    assert variant.ring < 227 << 10
    assert all(own.words % variant.programs == 0 for own in work.schedule.exchanges)


def test_best_variant_decides() -> None:
    records = [
        BenchRecord(case="a: threads poll", card="NVIDIA H200", metrics={"exchange_us": 1.3}),
        BenchRecord(case="a: program polls", metrics={"exchange_us": 1.1}),
        BenchRecord(case="a: a flag per program", settings={"failure": "it took too long"}),
        BenchRecord(case="b: 132 programs", metrics={"tb_s": 4.2}),
        BenchRecord(case="b: 8 rows x 1024, 13 stages", metrics={"tb_s": 3.7, "us": 238.0}),
    ]
    a, b = gates(records, "NVIDIA H200", None)
    assert (a.settings, a.metrics["holds"]) == ({"variant": "program polls", "failed": 1}, 1)
    assert (b.settings["variant"], b.metrics["holds"]) == ("8 rows x 1024, 13 stages", 0)
    assert b.metrics["limit"] == pytest.approx(0.9 * 4.25)
    (b,) = gates(records[3:], "NVIDIA H100", 3.0)
    assert b.metrics["holds"] == 1
    assert "a: a flag per program" in table(records, [a])


def test_gates_take_turns() -> None:
    names = names_in_turn("")
    assert [VARIANTS[name].gate for name in names[:4]] == ["ceiling", "a", "b", "c"]
    assert sorted(names) == sorted(VARIANTS)
