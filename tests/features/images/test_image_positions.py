"""Three-part rotary positions: on the host, on the device, and as transformers has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from quire.features.images.rope_positions import ImageSpan, rope_positions
from quire.ops import StepRows, section_rotary
from quire.ops.images import span_rows

LAYOUTS = {
    "no image": (9, []),
    "at the start": (17, [(0, 3, 4)]),
    "at the end": (16, [(4, 4, 3)]),
    "several": (32, [(2, 2, 5), (13, 5, 2), (24, 1, 7)]),
    "one token": (6, [(2, 1, 1)]),
}


def spans_of(images: list[tuple[int, int, int]]) -> list[ImageSpan]:
    return [ImageSpan(start, rows * columns, columns) for start, rows, columns in images]


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_equal_those_of_transformers(name: str) -> None:
    length, images = LAYOUTS[name]
    types = torch.zeros(1, length, dtype=torch.int32)
    for start, rows, columns in images:
        types[0, start : start + rows * columns] = 1
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for _, rows, columns in images]).view(-1, 3)
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig()
    expected, delta = model.get_rope_index(
        torch.zeros(1, length, dtype=torch.long), types, image_grid_thw=grids
    )
    found, own_delta = rope_positions(length, spans_of(images))
    assert np.array_equal(found, expected[:, 0].numpy())
    assert own_delta == int(delta)


def test_rows_of_a_step_follow_the_spans_of_their_lanes() -> None:
    lanes = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
    spans = torch.zeros(3, 4, 4, dtype=torch.int32)
    taken = {0: LAYOUTS["several"], 1: LAYOUTS["at the start"], 2: LAYOUTS["no image"]}
    for lane, (_, images) in taken.items():
        for place, span in enumerate(spans_of(images)):
            first = 100 * lane + 40 * place
            spans[lane, place] = torch.tensor([span.start, span.tokens, span.columns, first])
    pieces = [(2, 3, 5), (0, 1, 29), (1, 10, 4)]  # lane, first position, tokens
    positions, expected, index = [], [], []
    for lane, first, count in pieces:
        length, images = taken[lane]
        positions += range(first, first + count)
        expected.append(rope_positions(length, spans_of(images))[0][:, first : first + count])
        for position in range(first, first + count):
            own = [
                100 * lane + 40 * place + position - span.start
                for place, span in enumerate(spans_of(images))
                if 0 <= position - span.start < span.tokens
            ]
            index.append(own[0] if own else -1)
    starts = torch.tensor([0, 5, 34, 38, 38], dtype=torch.int32)
    rows = StepRows(lanes, starts, starts, torch.zeros(4, dtype=torch.int32))
    padded = torch.tensor([*positions, 0, 0], dtype=torch.int32)
    found = span_rows(rows, padded, spans)
    assert found.source.tolist() == [*index, -1, -1]
    assert np.array_equal(found.rotary[:, :38].numpy(), np.concatenate(expected, 1))
    assert not found.rotary[:, 38:].any()


def test_sections_take_their_part_of_the_positions() -> None:
    table = torch.randn(20, 8)
    positions = torch.randint(0, 20, (3, 5), dtype=torch.int32)
    part = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    found = section_rotary(table, positions, part)
    for token in range(5):
        for pair in range(4):
            row = table[positions[part[pair], token]]
            assert found[token, pair] == row[pair]
            assert found[token, 4 + pair] == row[4 + pair]
