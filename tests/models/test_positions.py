"""Rotary rows and cache slots of tokens, by absolute position, in every family.

With relative positions, an equal shift of all positions changes no logits, so comparing logits with
those of transformers would not find it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.layers.rotary import RotaryTable
from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from tests.models.checkpoints import CASES, make
from tests.models.harness import Harness

_EACH = {architecture: case for case, (architecture, *_) in reversed(CASES.items())}
"""The first case of each architecture."""
PROMPT = [5, 17, 99, 3, 42, 7, 7, 150, 23]
CHUNKS = (4, 3, 1, 1)
_UNWRITTEN = 3000.0


@pytest.fixture(scope="module", params=list(_EACH.values()))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(folder, request.param)
    spec = spec_from_config(load_config(folder))
    found = build_model(spec, device="cpu", dtype=torch.float32)
    load_weights(found, folder, "dummy")
    return found


def _tables(model: Decoder) -> list[RotaryTable]:
    return [table for table in model.modules() if isinstance(table, RotaryTable)]


def test_rows_turn_by_their_positions(model: Decoder) -> None:
    for table in _tables(model):
        turns = torch.complex(*table.cos_sin.double().chunk(2, dim=1))
        scale = turns[0].real
        assert (turns[0].imag == 0).all()
        assert (scale == scale[0]).all()
        torch.testing.assert_close(
            turns[1:9] / scale, turns[:8] / scale * turns[1] / scale, rtol=0, atol=1e-6
        )


def test_a_token_takes_the_row_of_its_position(model: Decoder) -> None:
    """All rows except those of a step's tokens are NaN."""
    whole = [table.cos_sin.clone() for table in _tables(model)]
    harness = Harness(model)
    row, first = harness.add(PROMPT), 0
    try:
        for count in CHUNKS:
            for table, rows in zip(_tables(model), whole, strict=True):
                table.cos_sin.fill_(torch.nan)
                table.cos_sin[first : first + count] = rows[first : first + count]
            (logits,) = harness.step([(row, count)])
            assert torch.isfinite(logits).all()
            first += count
    finally:
        for table, rows in zip(_tables(model), whole, strict=True):
            table.cos_sin.copy_(rows)


def _stored(harness: Harness) -> list[tuple[int, Tensor]]:
    """Returns each layer's cache of tokens as [slots, values], with the group of its blocks."""
    found = []
    for index, group in enumerate(harness.groups):
        for layer in () if group.kind == "state" else group.layers:
            kv = harness.kv[layer]
            for field in fields(kv):
                cache = getattr(kv, field.name)
                if isinstance(cache, Tensor) and cache.ndim == 4:
                    found.append((index, cache))
    return found


def test_a_token_writes_its_slot_and_reads_only_its_own_context(model: Decoder) -> None:
    """Unwritten slots are huge in one cache and zero in the other; logits are equal."""
    clean, filled = Harness(model), Harness(model)
    caches = _stored(filled)
    assert caches
    for _, cache in caches:
        cache.fill_(_UNWRITTEN)
    lanes = [(each, each.add(PROMPT), each.add(PROMPT[:7])) for each in (clean, filled)]
    for count in CHUNKS:
        expected, found = (
            each.step([(row, count) for row in rows if row.computed + count <= len(row.tokens)])
            for each, *rows in lanes
        )
        for own, logits in zip(expected, found, strict=True):
            assert torch.equal(logits, own)
    size, rows = filled.block_size, filled.sequences
    for index, cache in caches:
        slots = {
            (row.tables[index][place // size], place % size)
            for row in rows
            for place in range(row.computed)
        }
        # [blocks, heads, slots, values]
        written = (cache != _UNWRITTEN).any(3).any(1)
        assert {(int(block), int(place)) for block, place in written.nonzero()} == slots
