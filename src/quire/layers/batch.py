"""The inputs of one forward pass. A model knows requests and the KV cache only by these inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class GroupBatch:
    """The slots and blocks of one KV group in a step.

    Attributes:
        slots: int64 or int32 [T], the slot of each token's KV, block * block_size + offset. With
            slot -1 the KV is not stored. In a state group: int32 [R], the lane of each row, -1 for
            padding.
        block_table: int32 [R, max_blocks], each row's blocks in order of position. Entries past a
            row's length, or before its window, may hold anything. In a state group: the table of
            all lanes, see `KVGroup.table_width`.
        scratch: values that ops derive from the batch once and reuse in all layers. It must be
            empty when a step begins, even if the batch's tensors are refilled in place.
    """

    slots: Tensor
    block_table: Tensor
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GivenRows:
    """Embeddings of a step's tokens that are not in the vocabulary, such as an encoder's outputs.

    Attributes:
        source: int32 [T], a row of `values` for each token, -1 for tokens of the vocabulary.
        values: [N, hidden_size * parts]. The first part is the token's embedding. Part n is added
            to the residual stream after layer n, counted from 1 (DeepStack, Meng et al. 2024).
        parts: number of parts.
    """

    source: Tensor
    values: Tensor
    parts: int = 1

    def part(self, number: int) -> Tensor:
        """Returns the rows of one part, a view [N, hidden_size]."""
        return self.values.chunk(self.parts, dim=1)[number]


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows. Rows lie one after the other; tokens after the last row are padding.

    Attributes:
        input_ids: int32 [T].
        positions: int32 [T].
        query_start: int32 [R + 1], the index of each row's first token.
        seq_lens: int32 [R], context lengths that include this step's tokens. They may be known to
            the device only.
        groups: one `GroupBatch` for each KV group, in the order of `Decoder.kv_groups`.
        q_lens: number of tokens of each row, known to the host.
        max_q_len: upper bound of `q_lens`, for launch shapes.
        max_seq_len: upper bound of `seq_lens`, for launch shapes.
        even: see `ops.attention_schedule`.
        embedded: [T, hidden_size], the tokens' embeddings in the vocabulary if they are known
            already.
        given: embeddings from outside of the vocabulary, or None.
        rotary: int32 [3, T], rotary positions of models with `RopeSpec.sections`. None: they equal
            `positions`.
        token_types: int32 [T], each token's type; None: all are 0.
        angles: tables of cosines and sines for this step, see `RotaryTable.prepare`.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    groups: tuple[GroupBatch, ...]
    q_lens: tuple[int, ...]
    max_q_len: int
    max_seq_len: int
    even: bool | None = None
    embedded: Tensor | None = None
    given: GivenRows | None = None
    rotary: Tensor | None = None
    token_types: Tensor | None = None
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
