"""What passes between the brain and the body: a `StepPlan` down, a `StepResult` up.

Both are self-contained `msgspec` structs over int32 and float32 arrays, so that a plan can be sent
to any number of ranks as the same bytes. A **lane** is a request's place in the device's batch
state, stable for its life; a **slot** is a token's place in the KV cache; a **row** is one
request's share of one step.

The device tracks each lane's position by itself: an admission sets it to `Admit.computed`, a PROMPT
row advances it by `q_len`, a generating row by the number of tokens it accepted. So rows carry no
positions, and steps can be planned before earlier results are known.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec
import numpy as np

from quire.arrays import Float32, Int32, int32
from quire.sampling_params import SamplingParams


class RowFlag(enum.IntFlag):
    """PROMPT: the row's tokens are known to the host (prompt, or tokens of a resumed request).
    SAMPLE: the row's last logits give a new token (generating rows always sample).
    GATED: the step's head waits for `HeadInputs` (a grammar's mask)."""

    PROMPT = 1
    SAMPLE = 2
    GATED = 4


class StopReason(enum.IntEnum):
    """Why the device saw a row end. Stop strings are found later, on the text."""

    NONE = 0
    STOP_TOKEN = 1
    LENGTH = 2


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV blocks are booked together.

    `kind` full: every position is kept. window: the last `window` positions. state: a recurrent
    state of fixed size. `block_bytes` is the size of one block over all layers of the group, on
    one rank.
    """

    layers: tuple[int, ...]
    kind: Literal["full", "window", "state"] = "full"
    tokens_per_block: int = 16
    block_bytes: int = 0
    window: int | None = None


class Admit(msgspec.Struct, array_like=True):
    """A request takes a lane.

    tokens: all tokens the host knows, int32 [known]; the first `prompt_len` are the user's, more
        follow where the request resumes after preemption.
    computed: how many of them already have their KV in the blocks booked for the lane.
    max_total: the length, prompt included, at which the device reports `StopReason.LENGTH`.
    sample_index: which of the `n` completions; enters the random counter beside the seed.
    lane_epoch: counts the lane's tenants, so that a late message for an earlier one is recognized.
    """

    lane: int
    lane_epoch: int
    request_id: str
    tokens: Int32
    prompt_len: int
    computed: int
    max_total: int
    params: SamplingParams
    seed: int
    sample_index: int = 0


class BlockAppends(msgspec.Struct, array_like=True):
    """New entries of one group's block tables, ragged: lane `lanes[i]` gets `counts[i]` of `ids`
    at table indices from `starts[i]` on."""

    lanes: Int32
    starts: Int32
    counts: Int32
    ids: Int32


class BlockCopies(msgspec.Struct, array_like=True):
    """Whole-block copies within a group, done before the body (copy-on-write), in this order: a
    block whose contents are given up may be read by one copy and then written by the same or a
    later one, or by the body. None reads what an earlier one has written."""

    src: Int32
    dst: Int32


class Transfer(msgspec.Struct, array_like=True):
    """A move of one group's blocks. in: towards the device. out: away from it.

    place: "host": between device `blocks` and `slots` of the host's pool. "disk": between `slots`
        of the host's pool and files named by `keys`.
    blocks, slots: int32 [n]. keys: int32 [n, 4], the 16 bytes that stand for a block's contents.
    heads: a range of the group's heads, or None for all.

    What goes out is read as the steps before left it, and may be overwritten by this very step.
    What comes in is in place once `StepResult.finished_transfers` says so, and not before: until
    then nothing may read or write either end.
    """

    id: int
    direction: Literal["in", "out"]
    place: str
    group: int
    blocks: Int32
    heads: tuple[int, int] | None = None
    slots: Int32 = msgspec.field(default_factory=lambda: int32([]))
    keys: Int32 = msgspec.field(default_factory=lambda: int32([]).reshape(0, 4))


class StepPlan(msgspec.Struct):
    """One step, applied in this order: frees, admits, block appends, writes, transfers out, copies,
    transfers in, body, head.

    lanes, q_len, n_logits, flags: int32 [R], one entry per row. A row's logit rows are its last
        `n_logits` positions. A generating row has q_len = n_logits = 1 + its draft tokens.
    block_appends, copies: one entry per KV group.
    writes: per-lane columns of features, {column: (lanes [n], values [n, ...])}.
    host_drafts: draft tokens proposed by the host, int32 [R, K] padded with -1, or None.
    dummy_tokens: positions to compute and throw away (ranks keep step with others).
    A plan without rows is legal: it moves blocks, and its result comes when some have arrived, or
    after a moment.
    """

    step_id: int
    lanes: Int32
    q_len: Int32
    n_logits: Int32
    flags: Int32
    admits: list[Admit] = []
    frees: list[int] = []
    block_appends: list[BlockAppends] = []
    copies: list[BlockCopies] = []
    writes: dict[str, tuple[Int32, Int32]] = {}
    host_drafts: Int32 | None = None
    transfers: list[Transfer] = []
    dummy_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.lanes)

    @property
    def num_tokens(self) -> int:
        return int(self.q_len.sum()) + self.dummy_tokens

    @property
    def gated(self) -> bool:
        return bool((self.flags & RowFlag.GATED).any())

    @property
    def mask_lines(self) -> Int32:
        """Each row's line of `HeadInputs.mask`, -1 where it has none, int32 [R]."""
        waits = (self.flags & RowFlag.GATED) != 0
        return int32(np.where(waits, np.cumsum(waits) - 1, -1))


class HeadInputs(msgspec.Struct):
    """What the head of a step with GATED rows waits for. mask: uint32 bits as int32 [gated rows,
    ceil(vocab / 32)], in the plan's order; a set bit allows the token."""

    step_id: int
    mask: Int32


class Logprobs(msgspec.Struct):
    """Log-probabilities of M tokens, in row order.

    rows: int32 [M], index into the plan's rows. positions: int32 [M], the token's position.
    ids, values: [M, 1 + W]; column 0 is the token itself, then the W likeliest, padded with -1
        where a row asked for fewer. ranks: int32 [M], 1 for the likeliest token.
    """

    rows: Int32
    positions: Int32
    ids: Int32
    values: Float32
    ranks: Int32


class Pooled(msgspec.Struct):
    """Vectors in place of tokens. rows: int32 [M], index into the plan's rows, ascending. values:
    float32 [M, width]."""

    rows: Int32
    values: Float32


class StepResult(msgspec.Struct):
    """What a step produced, rows in the plan's order.

    tokens: int32 [R, K + 1], -1 where there is none. n_tokens: int32 [R], 0 in mid-prompt.
    stop_reason: int32 [R], a `StopReason`.
    drafts: int32 [R, K] the next step's draft tokens, for features that look at them, or None.
    pooled: of the rows whose prompt has become one vector with this step, or None.
    finished_transfers, failed_transfers: ids of those that ended since the last result; what a
        failed one wrote to is undefined.
    gpu_us: device time of the step in microseconds, 0 where it is not measured.
    """

    step_id: int
    tokens: Int32
    n_tokens: Int32
    stop_reason: Int32
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: Pooled | None = None
    drafts: Int32 | None = None
    finished_transfers: list[int] = []
    failed_transfers: list[int] = []
    gpu_us: float = 0.0
