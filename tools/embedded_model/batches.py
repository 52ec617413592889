"""Rows of packed documents, shuffled anew each epoch, on the training device.

A batch is three int tensors [batch, length]: the tokens, the next tokens (-100 where there is
nothing to learn), and the number of the document each token belongs to, which attention does not
look beyond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
Rows = tuple[Tensor, Tensor, Tensor]


@dataclass
class Documents:
    """tokens [total], learn [total] and starts [documents + 1], on one device."""

    tokens: Tensor
    learn: Tensor
    starts: Tensor

    @classmethod
    def load(cls, path: Path, device: str) -> Documents:
        with np.load(path) as arrays:
            tokens = torch.from_numpy(arrays["tokens"].astype(np.int32))
            learn = torch.from_numpy(arrays["learn"]).bool()
            starts = torch.from_numpy(arrays["starts"])
        return cls(tokens.to(device), learn.to(device), starts.to(device))

    @property
    def lengths(self) -> Tensor:
        return self.starts[1:] - self.starts[:-1]

    def shorter(self, length: int) -> Documents:
        """Returns the documents of fewer tokens than `length`."""
        return self.chosen(self.lengths < length)

    def chosen(self, kept: Tensor) -> Documents:
        """Returns some of the documents. kept: bool [documents]."""
        which = torch.repeat_interleave(torch.arange(len(kept), device=kept.device), self.lengths)
        lengths = self.lengths[kept]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Documents(self.tokens[kept[which]], self.learn[kept[which]], starts)

    def repeated(self, times: int) -> Documents:
        """All of them so many times over."""
        return self if times == 1 else self.joined(self.repeated(times - 1))

    def joined(self, other: Documents) -> Documents:
        """Both, one after the other."""
        return Documents(
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.learn, other.learn]),
            torch.cat([self.starts, other.starts[1:] + len(self.tokens)]),
        )


def _source(docs: Documents, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For the documents in `order`, joined: source index, place in the stream's order, offset."""
    lengths = docs.lengths[order]
    which = torch.repeat_interleave(torch.arange(len(order), device=order.device), lengths)
    begin = torch.cumsum(lengths, 0) - lengths
    offset = torch.arange(len(which), device=order.device) - begin[which]
    return docs.starts[order][which] + offset, which, offset


def stream_rows(docs: Documents, length: int, end: int, turn_start: int, seed: int) -> Rows:
    """All documents in random order, joined and cut into rows; every token is learned.

    Half of the plain texts get `end` before them, so that the model knows both a text that begins
    with it and one that begins with nothing. Conversations begin with `turn_start` and get none.
    """
    generator = torch.Generator().manual_seed(seed)
    device = docs.tokens.device
    order = torch.randperm(len(docs.starts) - 1, generator=generator).to(device)
    source, which, offset = _source(docs, order)
    tokens = docs.tokens[source]
    first = (offset == 0) & (tokens != turn_start)
    coin = torch.rand(len(order), generator=generator).to(device)[which] < 0.5
    copies = 1 + (first & coin).int()
    place = torch.repeat_interleave(torch.arange(len(tokens), device=device), copies)
    repeated = torch.cat([place[1:] == place[:-1], place.new_zeros(1).bool()])
    tokens, which = torch.where(repeated, end, tokens[place]), which[place]
    shift = int(torch.randint(length, (1,), generator=generator))
    tokens, which = tokens[shift:], which[shift:]
    target = torch.where(which[1:] == which[:-1], tokens[1:], IGNORE)
    count = len(target) // length
    return tuple(t[: count * length].view(count, length) for t in (tokens, target, which))


def whole_rows(docs: Documents, length: int, end: int, seed: int, all_tokens: bool = False) -> Rows:
    """Documents in random order, none cut: what does not fit a row's rest starts the next row."""
    generator = torch.Generator().manual_seed(seed)
    device = docs.tokens.device
    order = torch.randperm(len(docs.starts) - 1, generator=generator).to(device)
    lengths = docs.lengths[order].tolist()
    begins, at = [], 0
    for n in lengths:
        if at % length + n > length:
            at += length - at % length
        begins.append(at)
        at += n
    source, which, offset = _source(docs, order)
    place = torch.tensor(begins, device=device)[which] + offset
    total = -(-at // length) * length
    tokens = torch.full((total,), end, dtype=torch.int32, device=device)
    document = torch.full((total,), -1, dtype=which.dtype, device=device)
    target = torch.full((total,), IGNORE, dtype=torch.int32, device=device)
    tokens[place], document[place] = docs.tokens[source], which
    learned = (offset > 0) & (docs.learn[source] | all_tokens)
    target[place[learned] - 1] = docs.tokens[source[learned]]
    return tuple(t.view(-1, length) for t in (tokens, target, document))


def batches(rows: Rows, size: int, seed: int | None) -> Iterator[Rows]:
    """Full batches of `rows`, shuffled unless `seed` is None (then the last one is filled up)."""
    count = len(rows[0])
    if seed is None:
        order = torch.arange(count)
        order = torch.cat([order, order.new_zeros(-count % size)])
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for i in range(0, len(order) - size + 1, size):
        chosen = order[i : i + size].to(rows[0].device)
        tokens, target, document = (t[chosen].long() for t in rows)
        if i + size > count and seed is None:
            target[count - i :] = IGNORE
        yield tokens, target, document
