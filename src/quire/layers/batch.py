"""The tokens of one forward pass: the model's only view of requests and cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class GroupBatch:
    """One KV group's share of a batch.

    slots: int64 or int32 [T], where each token's KV goes (block * block_size + offset), -1:
        nowhere.
    block_table: int32 [R, max_blocks], the blocks of each row in order of position; entries past
        a row's length, or before its window, may hold anything.
    Of a state group, slots are the lanes of the rows, int32 [R], -1 for padding, and block_table is
    that of all lanes (see `KVGroup.table_width`).
    scratch: what ops derive from this batch once for all layers. Empty for a new step; a batch
        whose tensors are refilled in place needs an empty one.
    """

    slots: Tensor
    block_table: Tensor
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows, rows one after the other; tokens behind the last row are padding.

    input_ids, positions: int32 [T].
    query_start: int32 [R + 1], where each row's tokens begin.
    seq_lens: int32 [R], context lengths including this step's tokens, as the device knows them.
    groups: one per KV group, in the order of `Decoder.kv_groups`.
    q_lens: host copy of the row lengths, exact.
    max_q_len, max_seq_len: host upper bounds, for launch shapes.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    groups: tuple[GroupBatch, ...]
    q_lens: tuple[int, ...]
    max_q_len: int
    max_seq_len: int
