"""The kernels of masks, and of the wait for them, against their twins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from quire.input_memory import InputShape
from quire.ops.reference.mask import mask_logits as reference
from quire.ops.reference.mask import wait_for_inputs as wait_twin
from quire.ops.rows import LogitRows, StepRows
from quire.ops.triton import mask_logits
from quire.ops.triton.step import host
from quire.ops.triton.step.host import wait_for_inputs
from quire.runner.host_inputs import HostInputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 5003, 8192])
def test_mask(kernel_device: str, dtype: torch.dtype, vocab: int) -> None:
    make = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=make).to(dtype).to(kernel_device)
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (5, words), generator=make).int()
    mask[1], mask[2] = 0, -1
    mask = mask.to(kernel_device)
    expected = reference(logits.clone(), mask, None)
    allowed = [
        [bool(mask[r, t // 32].item() >> (t % 32) & 1) for t in range(vocab)] for r in (0, 4)
    ]
    assert torch.equal(torch.isfinite(expected[[0, 4]]).cpu(), torch.tensor(allowed))
    got = mask_logits(logits, mask, None)
    assert got is logits
    assert torch.equal(got, expected)
    assert torch.isinf(got[1]).all()
    assert torch.isfinite(got[2]).all()


def test_rows_of_a_wider_table(kernel_device: str) -> None:
    """Neither the words next to the rows nor spare words of a mask matter."""
    table = torch.zeros(4, 300, device=kernel_device)
    mask = torch.zeros(4, 12, dtype=torch.int32, device=kernel_device)
    mask[:, 0] = 5
    mask_logits(table[:, :250], mask, None)
    assert torch.isfinite(table[:, 250:]).all()
    assert torch.isfinite(table[:, [0, 2]]).all()
    assert torch.isinf(table[:, [1, 3, 249]]).all()


def test_no_rows(kernel_device: str) -> None:
    logits = torch.empty(0, 40, device=kernel_device)
    mask = torch.empty(0, 2, dtype=torch.int32, device=kernel_device)
    assert mask_logits(logits, mask, None).shape == (0, 40)


def test_lines(kernel_device: str) -> None:
    """Rows share a line, have no line, and come in another order."""
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 77, generator=make).to(kernel_device)
    mask = torch.randint(-(2**31), 2**31, (3, 3), generator=make).int().to(kernel_device)
    lines = torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32, device=kernel_device)
    expected = logits.clone()
    for row, line in enumerate(lines.tolist()):
        if line >= 0:
            reference(expected[row : row + 1], mask[line : line + 1], None)
    assert torch.equal(reference(logits.clone(), mask, lines), expected)
    assert torch.equal(mask_logits(logits, mask, lines), expected)
    assert torch.isfinite(expected[[1, 4]]).all()
    assert torch.isinf(expected[[0, 2, 3]]).any()


LANES, WIDTH = 8, 5


def pinned_for(device: str) -> torch.device:
    """Returns the device that memory of the host is for; without a GPU there is nothing to pin."""
    return torch.device(device if torch.cuda.device_count() else "cpu")


def waiting(device: str, rank: int = 0, world: int = 1) -> SimpleNamespace:
    """Returns a head's rows: a plain row, three GATED ones (the first with two drafts), a prompt's
    row, a GATED row of a lane that has ended, and padding."""
    lanes = [5, 2, 0, 7, 3, 6, -1, -1]
    flags = [2, 6, 6, 7, 1, 6, 0, 0]
    starts = [0, 1, 4, 5, 6, 6, 7, 7, 7]
    of_rows = [5, 2, 2, 2, 0, 7, -1, 99]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    host = HostInputs(pinned_for(device), InputShape(LANES, 3, 1), None, rank, world)
    return SimpleNamespace(
        rows=StepRows(ints(lanes), ints(starts), ints(starts), ints(flags)),
        logit_rows=LogitRows(
            ints(of_rows), ints([*range(8)]), ints([*range(10, 18)]), ints([0] * 8)
        ),
        position=torch.arange(100, 100 + LANES, dtype=torch.int32, device=device),
        last=torch.arange(8.0 * WIDTH, device=device).view(8, WIDTH),
        held=torch.zeros(LANES, WIDTH, device=device),
        host=host,
    )


def put(host: HostInputs, step_id: int, lanes: list[int]) -> None:
    for lane in lanes:
        host.put(step_id, lane)


def wait(side: Any, case: SimpleNamespace, step_id: int, patience_us: float = 3.0) -> None:
    gate = torch.tensor(case.host.gate(step_id), dtype=torch.int32, device=case.held.device)
    side(
        case.rows, case.logit_rows, gate, case.host.input_flags, position=case.position,
        last=case.last, held=case.held, patience_us=patience_us,
    )  # fmt: skip


SIDES = [pytest.param(wait_twin, id="twin"), pytest.param(wait_for_inputs, id="kernel")]
STEPS = [0, 7, 2**31 - 1, 2**31, 2**32 + 5, 2**40 - 1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step_id", STEPS)
def test_inputs_that_are_there(kernel_device: str, side: Any, step_id: int) -> None:
    """Also those of a later step; lanes without a logit row need none."""
    case, expected = waiting(kernel_device), waiting(kernel_device)
    put(case.host, step_id, [2, 7])
    put(case.host, step_id + 1, [0])
    wait(side, case, step_id)
    assert torch.equal(case.position, expected.position)
    assert torch.equal(case.held, expected.held)
    assert torch.equal(case.logit_rows.lanes, expected.logit_rows.lanes)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step_id", STEPS)
@pytest.mark.parametrize("late", [(2,), (0, 7), (2, 0, 7)])
def test_rows_that_are_late_sit_out(
    kernel_device: str, side: Any, step_id: int, late: tuple[int, ...]
) -> None:
    """Late rows leave the hidden state of their first logit row, and no logit row."""
    case = waiting(kernel_device)
    for lane in {2, 0, 7} - set(late):
        put(case.host, step_id, [lane])
    if step_id:
        put(case.host, step_id - 1, late)
    wait(side, case, step_id)
    firsts = {2: 1, 0: 4, 7: 5}
    for lane in range(LANES):
        first = firsts[lane] if lane in late else None
        held = torch.zeros(WIDTH) if first is None else case.last[first].cpu()
        assert torch.equal(case.held[lane].cpu(), held)
        # The hidden state is of position `length - 1`.
        place = 100 + lane if first is None else -2 - (10 + first - 1)
        assert case.position[lane] == place
    lanes = [-1 if lane in late else lane for lane in [5, 2, 2, 2, 0, 7]]
    assert case.logit_rows.lanes.tolist() == [*lanes, -1, 99]


@pytest.mark.parametrize("side", SIDES)
def test_other_ranks_do_as_the_first_says(kernel_device: str, side: Any) -> None:
    """Although they see other flags."""
    memory = np.zeros(InputShape(LANES, 3, 1).size, dtype=np.int8)
    cases = [waiting(kernel_device, rank, 2) for rank in range(2)]
    for rank, case in enumerate(cases):
        case.host = HostInputs(pinned_for(kernel_device), InputShape(LANES, 3, 1), memory, rank, 2)
    for step_id, there in ((8, [0, 2, 7]), (9, [7]), (10, [0, 7]), (11, [0, 2, 7])):
        for case in cases:
            case.logit_rows.lanes[1:4], case.logit_rows.lanes[4] = 2, 0
        put(cases[0].host, step_id, there)
        wait(side, cases[0], step_id)
        put(cases[0].host, step_id, [0, 2, 7])
        wait(side, cases[1], step_id)
        for name in ("position", "held", "last"):
            assert torch.equal(*(getattr(case, name) for case in cases))
        assert torch.equal(*(case.logit_rows.lanes for case in cases))


def looks_of(
    monkeypatch: pytest.MonkeyPatch, case: SimpleNamespace, step_id: int, **options: Any
) -> int:
    """Returns how often the kernel looks at the flags."""
    looks = 0
    load = interpreter.InterpreterBuilder.create_masked_load

    def watched(self: Any, *args: Any) -> Any:
        nonlocal looks
        found = load(self, *args)
        looks += found.data.dtype == np.int64 and bool(args[-1])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
        wait(wait_for_inputs, case, step_id, **options)
    return looks


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks are counted in the interpreter")
def test_how_long_rows_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing row adds to the wait, but not if a row needs no inputs. It lasts until one row
    is ready, but not for ever."""
    monkeypatch.setattr(host, "_TRIES", 9)
    case = waiting("cpu")
    assert looks_of(monkeypatch, case, 4, patience_us=1.0) == 1 + 2
    for there, looks in (([2], 3), ([0, 2], 2)):
        gated = waiting("cpu")
        gated.rows.lanes[0] = -1
        put(gated.host, 4, there)
        assert looks_of(monkeypatch, gated, 4, patience_us=1.0) == 1 + looks
    assert looks_of(monkeypatch, waiting("cpu"), 4, patience_us=0.0) == 1 + 1
    there = waiting("cpu")
    put(there.host, 4, [0, 2, 7])
    assert looks_of(monkeypatch, there, 4) == 1
    alone = waiting("cpu")
    alone.rows.lanes[0] = -1
    assert looks_of(monkeypatch, alone, 4, patience_us=3.0) == 1 + 9
    assert (alone.position[[0, 2, 7]] < -1).all()
    nobody = waiting("cpu")
    nobody.rows.flags.fill_(2)
    assert looks_of(monkeypatch, nobody, 4) == 0
