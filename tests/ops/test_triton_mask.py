"""The mask kernel against its twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from quire.ops.reference.mask import mask_logits as reference
from quire.ops.triton import mask_logits
from quire.ops.triton.step import host
from quire.ops.triton.step.host import wait_for_flag
from quire.runner.mask_ring import MaskRing


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


@pytest.mark.parametrize("step_id", [0, 7, 2**31, 2**32 + 5, 2**40 - 1])
def test_a_flag_that_is_there_is_not_waited_for(kernel_device: str, step_id: int) -> None:
    """The same holds for a later step's flag, and for a gate that names no flag."""
    ring = MaskRing(torch.device(kernel_device), depth=3, rows=1, words=1)
    ring.put(step_id, np.zeros((1, 1), dtype=np.int32))
    flags = ring.flags.clone()
    for gate in (ring.gate(step_id), ring.gate(max(0, step_id - 3)), (-1, 0, 0)):
        words = torch.tensor(gate, dtype=torch.int32, device=kernel_device)
        wait_for_flag(words, ring.flags)
    assert torch.equal(ring.flags, flags)


@pytest.mark.parametrize("step_id", [4, 2**31 + 1, 2**33 + 1])
def test_a_flag_that_comes_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, step_id: int
) -> None:
    """The kernel polls until the host has set the flag, or gives up after a timeout."""
    monkeypatch.setattr(host, "_TRIES", 3)
    ring = MaskRing(torch.device("cpu"), depth=2, rows=1, words=1)
    ring.put(step_id - 2, np.zeros((1, 1), dtype=np.int32))
    before = int(ring.flags[step_id % 2])
    gate = torch.tensor(ring.gate(step_id), dtype=torch.int32)
    if torch.cuda.is_available():
        pytest.skip("looks are counted in the interpreter")
    looks: list[int] = []
    load = interpreter.InterpreterBuilder.create_load

    def watched(self: Any, *args: Any) -> Any:
        found = load(self, *args)
        if found.data.dtype == np.int64 and args[-1]:
            looks.append(int(found.data.item()))
        return found

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_load", watched)
    wait_for_flag(gate, ring.flags)
    assert looks == [before] * 4
    ring.put(step_id, np.zeros((1, 1), dtype=np.int32))
    looks.clear()
    wait_for_flag(gate, ring.flags)
    assert looks == [int(ring.flags[step_id % 2])]
