"""Kernels of images against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.features.images.preparation import bicubic_taps
from quire.ops import StepRows, reference
from quire.ops.reference import images as twins
from quire.ops.triton.images import pixels as pixel_kernels
from quire.ops.triton.images import rows as row_kernels
from quire.ops.triton.images import tower as tower_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=_generator(seed))


@pytest.mark.parametrize(("size", "wanted"), [(5, 12), (40, 11), (3, 1), (1, 7), (400, 21)])
def test_resized_bytes_are_equal(kernel_device: str, size: int, wanted: int) -> None:
    taps = [torch.from_numpy(part) for part in bicubic_taps(size, wanted)]
    on = [part.to(kernel_device) for part in taps]
    high, wide = _bytes(size, 5, 3), _bytes(3, size, 3, seed=1)
    found = pixel_kernels.resize_rows(high.to(kernel_device), *on)
    assert torch.equal(found.cpu(), twins.resize_rows(high, *taps))
    found = pixel_kernels.resize_columns(wide.to(kernel_device), *on)
    assert torch.equal(found.cpu(), twins.resize_columns(wide, *taps))


@pytest.mark.parametrize(("patch", "merge", "temporal"), [(4, 2, 2), (3, 1, 1), (14, 2, 2)])
def test_patches_are_equal(kernel_device: str, patch: int, merge: int, temporal: int) -> None:
    unit = patch * merge
    image, values = _bytes(2 * unit, 3 * unit, 3), torch.randn(3, 256, generator=_generator())
    sizes = {"patch": patch, "merge": merge, "temporal": temporal}
    found = pixel_kernels.cut_patches(image.to(kernel_device), values.to(kernel_device), **sizes)
    assert torch.equal(found.cpu(), twins.cut_patches(image, values, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(16, 72), (3, 16)])
def test_rotated_heads(kernel_device: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    qkv = torch.randn(5, 3, heads, dim, generator=_generator()).to(dtype)
    angles = torch.randn(5, dim, generator=_generator(1))
    on = qkv.to(kernel_device)
    found = tower_kernels.rotate_heads(on[:, :2], angles.to(kernel_device))
    expected = twins.rotate_heads(qkv[:, :2], angles)
    torch.testing.assert_close(found.cpu(), expected)
    assert torch.equal(on[:, 2].cpu(), qkv[:, 2])


def _step(device: str) -> tuple[StepRows, Tensor, Tensor]:
    """Returns rows with and without images, and padding."""
    starts = torch.tensor([0, 7, 8, 8, 20, 20], dtype=torch.int32)
    lanes = torch.tensor([3, 0, 2, 1, -1], dtype=torch.int32)
    spans = torch.zeros(4, 3, 4, dtype=torch.int32)
    spans[3, 0] = torch.tensor([2, 6, 3, 10])
    spans[0, 0] = torch.tensor([1, 4, 1, -1])
    spans[0, 1] = torch.tensor([9, 12, 4, 40])
    spans[1, 0] = torch.tensor([0, 9, 3, 0])
    spans[1, 1] = torch.tensor([10, 5, 5, 20])
    positions = torch.tensor([*range(7), 30, *range(4, 16), 0, 0, 0], dtype=torch.int32)
    flags = torch.zeros(5, dtype=torch.int32)
    rows = StepRows(*(part.to(device) for part in (lanes, starts, starts, flags)))
    return rows, positions.to(device), spans.to(device)


def test_rows_of_spans(kernel_device: str) -> None:
    found = row_kernels.span_rows(*_step(kernel_device))
    expected = twins.span_rows(*_step("cpu"))
    assert torch.equal(found.source.cpu(), expected.source)
    assert torch.equal(found.rotary.cpu(), expected.rotary)
    assert (expected.source >= 0).sum() > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_values(kernel_device: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(6, 40, generator=_generator()).to(dtype)
    values = torch.randn(5, 100, generator=_generator(1)).to(dtype)[:, 30:70]
    source = torch.tensor([-1, 4, 0, -1, 4, 2], dtype=torch.int32)
    for kernel, twin in (
        (row_kernels.replace_rows, reference.replace_rows),
        (row_kernels.add_rows, reference.add_rows),
    ):
        own = hidden.clone().to(kernel_device)
        found = kernel(own, source.to(kernel_device), values.to(kernel_device))
        assert found is own
        torch.testing.assert_close(found.cpu(), twin(hidden.clone(), source, values))


@pytest.mark.parametrize("pairs", [4, 48, 64])
def test_rotary_by_sections(kernel_device: str, pairs: int) -> None:
    table = torch.randn(30, 2 * pairs, generator=_generator())
    positions = torch.randint(0, 30, (3, 7), dtype=torch.int32, generator=_generator(1))
    part = torch.arange(pairs, dtype=torch.int32) % 3
    found = row_kernels.section_rotary(*(x.to(kernel_device) for x in (table, positions, part)))
    assert torch.equal(found.cpu(), reference.section_rotary(table, positions, part))
