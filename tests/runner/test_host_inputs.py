"""Inputs of the host in lines by lane, with a flag for each lane."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.arrays import Int32, int32
from quire.input_memory import (
    DEPTH,
    InputMemory,
    InputShape,
    OverwrittenError,
    map_file,
)
from quire.plan import RowFlag, StepPlan
from quire.runner.hooks.mask import Mask
from quire.runner.host_inputs import HostInputs
from quire.runner.state import BatchState, Limits

CPU = torch.device("cpu")
_PROMPT, _SAMPLE, _GATED = int(RowFlag.PROMPT), int(RowFlag.SAMPLE), int(RowFlag.GATED)


def test_inputs_are_there_once_they_were_put() -> None:
    inputs = HostInputs(CPU, InputShape(3, 2, 2))
    lanes = int32([0, 2])
    inputs.put(3, 2)
    assert not inputs.has(3, lanes, wait=False)
    assert inputs.has(3, lanes[1:], wait=False)
    inputs.put(3, 0)
    assert inputs.has(3, lanes, wait=False)
    assert not inputs.has(4, lanes, wait=False)
    assert not inputs.has(3, int32([1]), wait=False)


def test_each_lane_has_its_lines() -> None:
    inputs = HostInputs(CPU, InputShape(3, 2, 2))
    assert inputs.buffer().shape == (6, 2)
    inputs.buffer()[:] = np.arange(12).reshape(6, 2)
    assert inputs.lines.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert inputs.flags.tolist() == [0, 0, 0]
    assert inputs.verdicts.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_flag_never_goes_back() -> None:
    """Inputs of a row that is over must not close what a later step has opened."""
    inputs = HostInputs(CPU, InputShape(1, 1, 2))
    inputs.put(4, 0)
    inputs.put(2, 0)
    assert inputs.has(4, int32([0]), wait=False)
    inputs.close()
    inputs.put(6, 0)
    assert inputs.has(10**9, int32([0]), wait=False)


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 3 * 2**40 + 2**31 + 5])
def test_a_gate_names_the_value_in_int32(step: int) -> None:
    """The flag has the value from when the inputs are there."""
    inputs = HostInputs(CPU, InputShape(1, 1, 2))
    low, high = np.array(inputs.gate(step), dtype=np.int32).tolist()
    value = (low & 0xFFFFFFFF) + (high << 32)
    if step:
        inputs.put(step - 1, 0)
    assert inputs.flags[0] < value
    inputs.put(step, 0)
    assert inputs.flags[0] == value


def test_inputs_over_one_memory_are_one() -> None:
    """Several ranks map one memory, and each looks for itself."""
    shape = InputShape(3, 2, 2)
    memory = np.zeros(shape.size, dtype=np.int8)
    ours, theirs = (HostInputs(CPU, shape, memory, rank, 2) for rank in range(2))
    ours.buffer()[4] = 7
    assert not theirs.has(4, int32([2]), wait=False)
    waiting = threading.Timer(0.05, ours.put, (4, 2))
    waiting.start()
    assert theirs.has(4, int32([2]), wait=True)
    assert theirs.lines[4].tolist() == [7, 7]
    waiting.join()


def test_waiting_for_another_thread() -> None:
    inputs = HostInputs(CPU, InputShape(2, 1, 1))
    brings = threading.Thread(target=lambda: [inputs.put(5, i) for i in (0, 1)])
    waiting = threading.Timer(0.05, brings.start)
    waiting.start()
    assert inputs.has(5, int32([0, 1]), wait=True)
    waiting.join()
    brings.join()


def test_closing_lets_those_through_who_wait() -> None:
    inputs = HostInputs(CPU, InputShape(2, 1, 1))
    closes = threading.Timer(0.05, inputs.close)
    closes.start()
    assert inputs.has(3, int32([0, 1]), wait=True)
    closes.join()
    assert (inputs.verdicts & 1 == 0).all()


# -- what inputs are made from -------------------------------------------------------------------


def test_results_and_claims_of_steps_in_flight() -> None:
    """Steps without GATED rows in between have none, and whoever comes too late gets an error."""
    inputs = HostInputs(CPU, InputShape(3, 2, 1, results=4, claims=2))
    arrivals: list[int] = []
    inputs.on_arrival = lambda: arrivals.append(1)
    steps = [2**31 - 2, 2**31 - 1, 2**31 + 3, 2**32 - 1, 2**32]
    for step in steps:
        gate = torch.tensor(inputs.gate(step), dtype=torch.int32)
        ids = torch.arange(6, dtype=torch.int32).view(3, 2) + step % 7
        assert inputs.claim(step, 1) is None
        inputs.send_claims(step, ids, ids[:, 0] + 5, gate)
        assert inputs.result(step, 1) is None
        found = inputs.claim(step, 1)
        assert found is not None
        assert (found[0].tolist(), found[1]) == ([2 + step % 7, 3 + step % 7], 7 + step % 7)
        results = torch.full((2, 4), step % 5, dtype=torch.int32)
        inputs.send_results(step, results, gate)
        assert inputs.result(step, 1) == [step % 5] * 4
    assert len(arrivals) == 2 * len(steps)
    assert inputs.result(steps[-2], 0) == [steps[-2] % 5] * 4
    later = torch.tensor(inputs.gate(steps[-1] + DEPTH), dtype=torch.int32)
    inputs.send_results(steps[-1] + DEPTH, torch.zeros(1, 4, dtype=torch.int32), later)
    with pytest.raises(OverwrittenError):
        inputs.result(steps[-1], 0)


def test_another_process_maps_the_memory() -> None:
    inputs = HostInputs(CPU, InputShape(3, 2, 5), remote=True)
    assert inputs.file is not None
    theirs = InputMemory(inputs.shape, map_file(*inputs.file, inputs.shape.size), remote=True)
    theirs.buffer()[2] = 9
    theirs.put(4, 1)
    assert inputs.has(4, int32([1]), wait=True)
    assert inputs.lines[2].tolist() == [9] * 5
    inputs.close()
    assert inputs.file is None


def test_a_part_of_a_file(tmp_path: Path) -> None:
    """Several ranks share a file, in which other things lie too."""
    shape = InputShape(2, 1, 3)
    whole = np.memmap(tmp_path / "memory", np.int8, "w+", shape=(8192 + shape.size,))
    inputs = HostInputs(CPU, shape, whole[4096 : 4096 + shape.size], remote=True)
    assert inputs.file is not None
    theirs = InputMemory(shape, map_file(*inputs.file, shape.size), remote=True)
    theirs.put(1, 1)
    assert inputs.flags.tolist() == [0, 2]
    inputs.close()


def packed(plan: StepPlan, drafts: int) -> tuple[list[int], list[int]]:
    """Returns the lines of the plan's logit rows, and its gate."""
    limits = Limits(lanes=6, tokens=32, logit_rows=16, length=8, drafts=drafts)
    config: Any = SimpleNamespace(scheduler=SimpleNamespace(steps_in_flight=1), vocab_size=32)
    hook = Mask(config)
    state = BatchState(limits, [], CPU, [])
    state.columns["draft_ids"] = state.columns["draft_start"] = torch.zeros(6, dtype=torch.int32)
    hook.bind(state)
    inputs: Int32 = state.idle_inputs()
    hook.pack(plan, inputs)
    *_, lines, gate, _ = state.split_inputs(inputs)
    return lines.tolist(), gate.tolist()


def test_each_logit_row_of_a_gated_row_has_a_line_of_its_lane() -> None:
    flags = [_SAMPLE | _GATED, _SAMPLE, _SAMPLE | _GATED, _PROMPT, _PROMPT | _SAMPLE | _GATED]
    n_logits = int32([3, 2, 1, 0, 4])
    plan = StepPlan(6, int32([4, 0, 2, 1, 5]), int32([3, 2, 1, 5, 6]), n_logits, int32(flags))
    lines, gate = packed(plan, 2)
    # A prompt samples from its last logit row only, and has no other in the head.
    assert lines == [12, 13, 14, -1, -1, 6, 15, *[-1] * 9]
    assert gate == [7, 0]


def test_without_gated_rows_there_are_no_lines() -> None:
    plan = StepPlan(0, int32([0]), int32([2]), int32([2]), int32([_SAMPLE]))
    assert packed(plan, 1)[0] == [-1] * 16


def test_sets_of_lines() -> None:
    """Steps use a lane's sets in turn; the step that continues a late row gets its line."""
    inputs = HostInputs(CPU, InputShape(2, 2, 1, sets=3))
    assert inputs.buffer().shape == (12, 1)
    firsts = [inputs.first_lines(step, int32([0, 1])).tolist() for step in range(4)]
    assert firsts == [[0, 6], [2, 8], [4, 10], [0, 6]]
    inputs.buffer()[8] = 5
    inputs.copy_line(1, 3, 1)
    assert inputs.buffer()[6] == 5
