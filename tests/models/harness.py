"""Drives a Decoder without an engine, with a paged cache of shuffled blocks and any mix of rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.models import Decoder, ForwardBatch, GroupBatch
from quire.ops import kv_format
from quire.runner.kv_cache import KVCache


@dataclass
class Row:
    """A sequence: its tokens, the number of tokens with cached KV, and its blocks per group."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0


@dataclass
class Harness:
    model: Decoder
    block_size: int = 4
    num_blocks: int = 256
    seed: int = 0
    kv_cache_dtype: str = "auto"
    head_scales: Tensor | None = None
    padding: int = 0
    """Padding tokens put behind the rows of every step."""
    sequences: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.model
        form = kv_format(self.kv_cache_dtype, model.dtype, *model.spec.head_dims)
        self.groups = model.kv_groups(self.block_size, form)
        cache = KVCache(
            self.groups,
            [self.num_blocks] * len(self.groups),
            layouts=model.kv_layouts,
            kv_format=form,
            device=model.device,
            head_scales=self.head_scales,
        )
        for index, group in enumerate(self.groups):
            tensors = cache.block_tensors(index)
            assert sum(tensor[0].nbytes for tensor in tensors) == group.block_bytes
        self.kv = cache.layers
        self.free: list[list[int]] = []
        draw = random.Random(self.seed)
        for _ in self.groups:
            blocks = list(range(self.num_blocks))
            draw.shuffle(blocks)
            self.free.append(blocks)

    def save(self, row: Row, position: int) -> int:
        """Makes a step copy the row's state after this many tokens. Returns the copy's slot."""
        table = row.tables[-1]
        if not table:
            table += [self.free[-1].pop(), *[0] * (self.groups[-1].table_width(0) - 1)]
        slot = self.free[-1].pop()
        place = table.index(0, 1)
        table[place : place + 2] = [position, slot]
        return slot

    def add(self, tokens: Sequence[int]) -> Row:
        sequence = Row(list(tokens), [[] for _ in self.groups])
        self.sequences.append(sequence)
        return sequence

    def step(self, rows: Sequence[tuple[Row, int]]) -> list[Tensor]:
        """Computes the next `n` tokens of each (sequence, n); returns each row's logits [n,
        vocab]."""
        batch = self._batch(rows)
        with torch.inference_mode():
            hidden = self.model(batch, self.kv)
            logits = self.model.logits(hidden[: sum(batch.q_lens)]).float()
        for sequence, count in rows:
            sequence.computed += count
        return list(logits.split([count for _, count in rows]))

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int = 1 << 30
    ) -> list[list[int]]:
        """Returns greedy continuations of all prompts, computed together and in chunks."""
        sequences = [self.add(prompt) for prompt in prompts]
        while True:
            rows = [
                (sequence, min(chunk, len(sequence.tokens) - sequence.computed))
                for sequence, prompt in zip(sequences, prompts, strict=True)
                if len(sequence.tokens) < len(prompt) + count
            ]
            if not rows:
                break
            for (sequence, _), logits in zip(rows, self.step(rows), strict=True):
                if sequence.computed == len(sequence.tokens):
                    sequence.tokens.append(int(logits[-1].argmax()))
        return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]

    def _batch(self, rows: Sequence[tuple[Row, int]]) -> ForwardBatch:
        def tensor(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.model.device)

        pad = [0] * self.padding
        ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        for sequence, count in rows:
            start = sequence.computed
            ids += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            lengths.append(start + count)
        q_lens = tuple(count for _, count in rows)
        starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
        return ForwardBatch(
            input_ids=tensor(ids + [-1] * self.padding),
            positions=tensor(positions + pad),
            query_start=tensor(starts),
            seq_lens=tensor(lengths),
            groups=tuple(self._group(index, rows, tensor) for index in range(len(self.groups))),
            q_lens=q_lens,
            max_q_len=max(q_lens),
            max_seq_len=max(lengths),
        )

    def _group(self, index: int, rows: Sequence[tuple[Row, int]], tensor) -> GroupBatch:  # type: ignore[no-untyped-def]
        if self.groups[index].kind == "state":
            return self._states(index, rows, tensor)
        size = self.block_size
        window = self.groups[index].window
        slots: list[int] = []
        tables: list[list[int]] = []
        for sequence, count in rows:
            table = sequence.tables[index]
            end = sequence.computed + count
            while len(table) * size < end:
                table.append(self.free[index].pop())
            slots += [table[p // size] * size + p % size for p in range(sequence.computed, end)]
            tables.append(list(table))
            if window is not None:
                # No later token attends to these blocks, so their contents may be anything from now
                # on.
                for old in range(max(0, sequence.computed - window + 1) // size):
                    tables[-1][old] = -1
        width = max(len(table) for table in tables) + 1
        padded = [table + [-1] * (width - len(table)) for table in tables]
        return GroupBatch(tensor(slots + [-1] * self.padding), tensor(padded))

    def _states(self, index: int, rows: Sequence[tuple[Row, int]], tensor) -> GroupBatch:  # type: ignore[no-untyped-def]
        for sequence, _ in rows:
            if not sequence.tables[index]:
                rest = [0] * (self.groups[index].table_width(0) - 1)
                sequence.tables[index] = [self.free[index].pop(), *rest]
        empty = [-1] * self.groups[index].table_width(0)
        lanes = [self.sequences.index(sequence) for sequence, _ in rows]
        tables = [sequence.tables[index] or empty for sequence in self.sequences]
        return GroupBatch(tensor(lanes), tensor(tables))
