"""One builder of masks, without an engine: turns of lanes, grammars that fail, and its channel."""

from __future__ import annotations

import socket
import time
import traceback
from typing import Any

import numpy as np
import pytest

from quire.arrays import int32
from quire.features.structured_output.channel import MaskChannel
from quire.features.structured_output.compiler import Compiler
from quire.features.structured_output.mask_process import Pace
from quire.features.structured_output.mask_worker import MaskWorker
from quire.features.structured_output.messages import (
    Close,
    Compiled,
    Enter,
    GatedRow,
    Leave,
    MaskFailure,
    MaskParams,
    Open,
    Rows,
)
from quire.input_memory import InputMemory, InputShape
from quire.plan import StopReason
from quire.sampling_params import StructuredOutputsParams

PROMPT = int32([5, 6, 7])


@pytest.fixture
def inputs(compiler: Compiler) -> InputMemory:
    shape = InputShape(2, 1, -(-compiler.vocab_size // 32))
    return InputMemory(shape, np.zeros(shape.size, dtype=np.int8))


class Builder:
    """A builder, and what it has reported."""

    def __init__(self, compiler: Compiler, inputs: InputMemory) -> None:
        self.reports: list[Any] = []
        self.inputs = inputs
        self.worker = MaskWorker(compiler, inputs, self.reports.append)

    def open(self, key: int, **grammar: Any) -> None:
        params = MaskParams(StructuredOutputsParams(**grammar), len(PROMPT))
        self.worker.handle(Open(key, params))

    def compiled(self) -> None:
        """Waits until all grammars are compiled, or have failed."""
        while self.worker.compiles:
            self.worker.turn()
            time.sleep(1e-3)

    def enter(self, key: int, lane: int, turn: int) -> None:
        self.worker.handle(Enter(key, lane, turn, PROMPT.tobytes(), len(PROMPT)))

    def plan(self, step_id: int, key: int, place: int = 0, held: bool = False) -> None:
        epoch = int(held)
        row = GatedRow(key, place, 1, epoch, held)
        self.worker.handle(Rows.of(step_id, int32([row])))
        self.worker.turn()

    def result(self, step_id: int, token: int, stop: int = 0) -> None:
        """Lets the device write the result of the first row of a step."""
        self.inputs.results[step_id % 64, 0] = (0 if stop else 1), stop, token
        self.inputs.newest[0] = step_id + 1
        self.worker.turn()


@pytest.fixture
def builder(compiler: Compiler, inputs: InputMemory) -> Builder:
    return Builder(compiler, inputs)


def allowed(inputs: InputMemory, lane: int) -> int:
    bits = np.unpackbits(inputs.buffer()[lane].view(np.uint8), bitorder="little")
    return int(bits.sum())


def test_masks_follow_the_results(builder: Builder, compiler: Compiler) -> None:
    builder.open(1, regex="ab[0-9]")
    builder.compiled()
    builder.enter(1, 0, 0)
    builder.plan(3, 1)
    assert builder.inputs.flags.tolist() == [4, 0]
    first = allowed(builder.inputs, 0)
    builder.plan(4, 1)
    assert builder.inputs.flags[0] == 4  # its token is not known
    (token,) = compiler._tokenizer.result().tokenize_str("ab")  # type: ignore[union-attr]
    builder.result(3, token)
    assert builder.inputs.flags[0] == 5
    assert allowed(builder.inputs, 0) == 10 != first
    assert [type(each) for each in builder.reports if not hasattr(each, "stats")] == [Compiled]


def test_a_late_row_keeps_its_masks(builder: Builder) -> None:
    """The rows behind it give nothing, and the next one finds the masks in their lines."""
    builder.open(1, regex="[0-9]{4}")
    builder.compiled()
    builder.enter(1, 0, 0)
    for step in (0, 1, 2):
        builder.plan(step, 1)
    masks = builder.inputs.buffer()[0].copy()
    builder.result(0, 0, stop=StopReason.LATE)
    assert builder.inputs.flags[0] == 3  # nothing waits for the rows behind
    builder.plan(5, 1, held=True)
    assert (builder.inputs.buffer()[0] == masks).all()
    builder.plan(6, 1)
    assert builder.inputs.flags[0] == 3
    digit = int(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))[0])
    builder.result(5, digit)
    assert builder.inputs.flags[0] == 7


def test_a_lane_changes_hands_between_builders(
    builder: Builder, compiler: Compiler, inputs: InputMemory
) -> None:
    """The lines of a lane are written once all earlier requests have left it."""
    other = Builder(compiler, inputs)
    for key, each in ((1, builder), (2, other), (3, builder)):
        each.open(key, regex="[ab]{9}")
        each.compiled()
    builder.enter(1, 0, 0)
    builder.plan(0, 1)
    other.enter(2, 0, 1)
    other.plan(5, 2)
    assert inputs.flags[0] == 1
    builder.plan(4, 1)
    builder.enter(3, 0, 2)
    builder.plan(7, 3)
    # The second one ends before the first one has left.
    other.worker.handle(Leave(2, 0, 1))
    assert inputs.flags[0] == 1
    builder.worker.handle(Leave(1, 0, 0))
    assert inputs.flags[0] == 5  # nothing waits for its row
    assert inputs.turns[0] == 1
    assert other.worker.waits
    other.worker.turn()
    assert (inputs.turns[0], inputs.flags[0]) == (2, 6)
    builder.worker.turn()
    assert inputs.flags[0] == 8
    for each, key in ((builder, 1), (other, 2)):
        each.worker.handle(Close(key))
    assert not other.worker.waits


def test_a_grammar_that_fails_in_its_lane(builder: Builder) -> None:
    """The lane was given before that was known. Rows get masks that allow all."""
    builder.open(1, regex="(?=a)b")
    builder.enter(1, 1, 0)
    builder.plan(0, 1)
    builder.compiled()
    builder.enter(1, 1, 0)
    builder.plan(1, 1)
    failures = [each for each in builder.reports if isinstance(each, MaskFailure)]
    assert [(each.key, each.code) for each in failures] == [(1, "invalid_grammar")]
    assert builder.inputs.flags.tolist() == [0, 2]
    assert (builder.inputs.buffer()[1] == -1).all()


def test_a_refused_grammar_keeps_nothing_of_its_requests(
    builder: Builder, compiler: Compiler
) -> None:
    """The compiler keeps the refusal. Raising it would add each request's frames to it."""
    grammar = StructuredOutputsParams(regex="(refused")
    for key in range(1, 4):
        builder.open(key, regex="(refused")
        builder.compiled()
        builder.worker.handle(Close(key))
    failures = [each for each in builder.reports if isinstance(each, MaskFailure)]
    assert [each.key for each in failures] == [1, 2, 3]
    refusal = compiler.compile(grammar).exception()
    assert refusal is not None
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(refusal.__traceback__)]
    assert not any(name.endswith("mask_worker.py") for name in frames)


def test_messages_of_requests_that_are_gone(builder: Builder) -> None:
    """A process that has taken another's place knows none of its requests."""
    builder.enter(7, 1, 0)
    builder.plan(3, 7)
    builder.worker.handle(Leave(7, 1, 0))
    builder.worker.handle(Close(7))
    assert builder.inputs.turns.tolist() == [0, 1]
    assert not builder.worker.waits


def test_a_channel_that_is_full() -> None:
    """The rest of a message is sent when the other end has read."""
    one, two = (MaskChannel(end) for end in socket.socketpair())
    messages = [bytes([i]) * size for i, size in enumerate((0, 1, 3_000_000, 5, 700_000))]
    for message in messages:
        one.send(message)
    found: list[bytes] = []
    while len(found) < len(messages):
        found += two.receive()
        one.flush()
    assert found == messages
    two.send(b"back")
    one.wait(1.0)
    assert one.receive() == [b"back"]
    two.close()
    with pytest.raises(EOFError):
        one.receive()
    one.send(b"lost")
    one.close()


def test_a_process_looks_often_when_the_device_is_expected() -> None:
    pace = Pace()
    for step in range(9):
        pace.work(0.002 * step)
        pace.work(0.002 * step + 0.00005)  # a row came a little later
    last = 0.002 * 8 + 0.00005
    for step in range(9, 20):
        pace.work(0.002 * step)
        last = 0.002 * step
    looks, now = [], last
    while now < last + 0.004:
        now += pace.sleep(now)
        looks.append(now - last)
    before = [look for look in looks if look < 0.0015]
    near = [look for look in looks if 0.0018 < look < 0.0022]
    assert len(before) < 5 < len(near)
    gaps = np.diff([look for look in looks if look > 0.0019])
    assert gaps.max() < 0.0001
    assert pace.sleep(last + 10.0) < 0.001
