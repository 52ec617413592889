"""One block of a model run over whole sequences, without an engine."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire import ops
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.residual import Residual
from quire.models.decoder import Block

_BLOCK_SIZE = 16
_TOKENS = 4096
"""Tokens that are computed at once."""


class Sequences:
    """Runs a model's blocks over sequences of `length` tokens. Blocks that share a layout and a
    window may take turns."""

    def __init__(self, block: Block, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows = max(1, _TOKENS // length)
        self._make = functools.partial(_Places, block, length, device, dtype)
        self._places: dict[int, _Places] = {}

    @torch.inference_mode()
    def run(self, block: Block, states: Tensor) -> None:
        """Replaces hidden states [n, length, width], on the host, by those after the block."""
        for start in range(0, len(states), self.rows):
            part = states[start : start + self.rows]
            if len(part) not in self._places:
                self._places[len(part)] = self._make(len(part))
            part.copy_(self._places[len(part)].run(block, part))


class _Places:
    """The places of `rows` sequences, and the KV of one block's layer."""

    def __init__(
        self, block: Block, length: int, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        layout, window = block.attention.layout, block.attention.spec.window
        per_row = -(-length // _BLOCK_SIZE)
        shape = rows * per_row, 2, layout.kv_heads, _BLOCK_SIZE, layout.head_dim
        values = torch.zeros(shape, dtype=dtype, device=device)
        self._kv = ops.KVLayer(values[:, 0], values[:, 1])
        whole = torch.arange(length, dtype=torch.int32, device=device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        table = torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row)
        slots = table[:, :1] * _BLOCK_SIZE + whole
        schedule = ops.attention_schedule(
            starts,
            lengths,
            heads=layout.query_heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=dtype,
            kv_format=self._kv.format,
            tokens=rows * length,
            max_q_len=length,
            window=window,
        )
        self._group = GroupBatch(
            slots.flatten().contiguous(), table, {"workspace": {}, "schedule": schedule}
        )
        self._batch = ForwardBatch(
            input_ids=whole.repeat(rows),
            positions=whole.repeat(rows),
            query_start=starts,
            seq_lens=lengths,
            groups=(self._group,),
            q_lens=(length,) * rows,
            max_q_len=length,
            max_seq_len=length,
        )

    def run(self, block: Block, states: Tensor) -> Tensor:
        x = Residual(states.to(self._batch.positions.device).flatten(0, 1))
        out: Residual = block(x, self._batch, self._group, self._kv)
        return out.total().view(states.shape)
