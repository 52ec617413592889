"""The expansion of a step's rows against plain indexing."""

from __future__ import annotations

import torch

from quire.ops.triton.batch import expand_batch, finish_rows, scatter


def test_expand_batch(kernel_device: str) -> None:
    make = torch.Generator().manual_seed(0)
    lanes, max_len, pages = [5, -1, 0, 3, -1], 3000, (16, 4)
    q_lens, at = [1, 0, 1500, 7, 0], {5: 40, 0: 100, 3: 15}
    position = torch.full((6,), -9, dtype=torch.int32)
    for lane, first in at.items():
        position[lane] = first
    tokens = torch.randint(0, 1000, (6, max_len), generator=make).int()
    tables = [torch.randint(0, 99, (6, max_len // p), generator=make).int() for p in pages]
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    device = kernel_device
    ids, positions, seq_lens, groups = expand_batch(
        torch.tensor(lanes).int().to(device), starts.to(device), position.to(device),
        tokens.to(device), [(t.to(device), p) for t, p in zip(tables, pages, strict=True)],
        num_tokens=1515, max_seq_len=2000,
    )  # fmt: skip
    wanted = {"ids": [-1] * 1515, "positions": [0] * 1515}
    for row, (lane, length) in enumerate(zip(lanes, q_lens, strict=True)):
        first = 0 if lane < 0 else at[lane]
        assert seq_lens[row] == (0 if lane < 0 else first + length)
        for i in range(length):
            wanted["positions"][starts[row] + i] = first + i
            wanted["ids"][starts[row] + i] = int(tokens[lane, first + i])
    assert ids.tolist() == wanted["ids"]
    assert positions.tolist() == wanted["positions"]
    for (slots, own), table, page in zip(groups, tables, pages, strict=True):
        for row, (lane, length) in enumerate(zip(lanes, q_lens, strict=True)):
            place = torch.arange(length) + (0 if lane < 0 else at[lane])
            span = slice(int(starts[row]), int(starts[row + 1]))
            want = table[lane][place // page].long() * page + place % page
            assert torch.equal(slots[span].cpu(), want)
            used = -(-(int(seq_lens[row])) // page)
            assert torch.equal(own[row, :used].cpu(), table[lane, :used])
        assert (slots[int(starts[-1]) :] == -1).all()


def test_finish_moves_lanes_and_says_why_rows_end(kernel_device: str) -> None:
    def ints(*values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    position = ints(4, 10, 0, 7)
    tokens = torch.zeros(4, 16, dtype=torch.int32, device=kernel_device)
    stops = ints([5, 6, -1], [5, -1, -1], [-1, -1, -1], [5, -1, -1])
    counts = torch.zeros(4, 12, dtype=torch.int32, device=kernel_device)
    results = finish_rows(
        lanes=ints(3, 0, 1, 2, -1),
        query_start=ints(0, 1, 2, 3, 8, 8),
        samples=ints(1, 1, 1, 0, 0),
        sampled=ints(5, 6, 9, 5, 5),
        position=position,
        tokens=tokens,
        max_total=ints(16, 12, 16, 16),
        min_total=ints(6, 0, 0, 0),
        stops=stops,
        counts=counts,
    )
    assert counts.nonzero().tolist() == [[0, 6], [1, 9], [3, 5]]
    assert counts.sum() == 6
    # A stop; a stop that comes too early; the longest length; mid-prompt; padding.
    assert results[0].tolist()[:4] == [5, 6, 9, -1]
    assert results[1].tolist()[:4] == [1, 0, 2, 0]
    assert position.tolist() == [5, 11, 5, 8]
    assert [tokens[lane, at].item() for lane, at in ((3, 8), (0, 5), (1, 11), (2, 5))] == [
        *(5, 6, 9, 0)
    ]


def test_scatter_writes_words_where_they_belong(kernel_device: str) -> None:
    ints = torch.zeros(70, 50, dtype=torch.int32, device=kernel_device)
    floats = torch.zeros(33, device=kernel_device)
    where = torch.randperm(3500, generator=torch.Generator().manual_seed(0))[:1500]
    places = where.to(kernel_device)
    values = torch.arange(1500, dtype=torch.int32, device=kernel_device) + 1
    more = torch.tensor([0.5, -2.0], device=kernel_device)
    scatter(
        torch.cat(
            [ints.data_ptr() + 4 * places, floats.data_ptr() + 4 * places.new_tensor([3, 32])]
        ),
        torch.cat([values, more.view(torch.int32)]),
    )
    want = torch.zeros_like(ints).view(-1)
    want[places] = values
    assert torch.equal(ints.view(-1), want)
    assert floats[[3, 32]].tolist() == [0.5, -2.0]
    assert floats.count_nonzero() == 2
