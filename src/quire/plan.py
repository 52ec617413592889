"""The messages between the brain and the body: a `StepPlan` down, a `StepResult` up.

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

DRAFT_IDS, DRAFT_START = "draft_ids", "draft_start"
"""Columns of draft tokens; see `StepPlan`."""


class RowFlag(enum.IntFlag):
    """PROMPT: the row's tokens are known to the host (prompt, or tokens of a resumed request).
    SAMPLE: the row's last logits give a new token (generating rows always sample).
    GATED: the step's head waits for `HeadInputs` (a grammar's mask)."""

    PROMPT = 1
    SAMPLE = 2
    GATED = 4


class StopReason(enum.IntEnum):
    """Why the device saw a row end. Stop strings are found later, on the text. BROKEN: the logits
    were not numbers."""

    NONE = 0
    STOP_TOKEN = 1
    LENGTH = 2
    BROKEN = 3


NO_CLAIM = 2**30
"""The `draft_start` of a lane without drafts: beyond any text."""


def claim_width(drafts: int) -> int:
    """Returns the tokens of a claim (the column `draft_ids`) where a row has up to `drafts`.

    A claim is made for a text that goes on growing while steps are in flight.
    """
    return 4 * drafts


STATE_SAVES = 8
"""The most checkpoints that a row leaves."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV blocks are booked together.

    `kind` full: every position is kept. window: the last `window` positions. state: a recurrent
    state of fixed size, for which a block is a slot. `block_bytes` is the size of one block over
    all layers of the group, on one rank.
    """

    layers: tuple[int, ...]
    kind: Literal["full", "window", "state"] = "full"
    tokens_per_block: int = 16
    block_bytes: int = 0
    window: int | None = None

    def table_width(self, length: int) -> int:
        """Returns the entries of a lane's block table. That of a state has the lane's slot, then
        pairs (position, slot): the body copies the state behind that many tokens to that slot when
        it comes by."""
        if self.kind == "state":
            return 1 + 2 * STATE_SAVES
        return -(-length // self.tokens_per_block)


class Admit(msgspec.Struct, array_like=True):
    """A request takes a lane.

    tokens: all tokens the host knows, int32 [known]; the first `prompt_len` are the user's, more
        follow where the request resumes after preemption.
    computed: how many of them already have their KV in the blocks booked for the lane.
    max_total: the length, prompt included, at which the device reports `StopReason.LENGTH`.
    sample_index: which of the `n` completions; enters the random counter beside the seed.
    params: as the device applies them; features may apply others (`Feature.device_params`).
    lane_epoch: counts the requests that the lane has had, so that a late message for an earlier one
        is recognized.
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
        of the host's pool and files named by `keys`. "peer": between device `blocks` and `slots` of
        the memory between peers, or of the peer's own, which `source` describes. On each rank it is
        a move of the rank's own heads.
    step: of the peer, in which its blocks are filled, layer by layer; -1: they have been.
    blocks, slots: int32 [n]. keys: int32 [n, 4], the 16 bytes that stand for a block's contents.

    What goes out is read as the steps before left it, and may be overwritten by this very step.
    What comes in is in place once `StepResult.finished_transfers` says so, and not before: until
    then nothing may read or write either end.
    """

    id: int
    direction: Literal["in", "out"]
    place: str
    group: int
    blocks: Int32
    slots: Int32 = msgspec.field(default_factory=lambda: int32([]))
    keys: Int32 = msgspec.field(default_factory=lambda: int32([]).reshape(0, 4))
    source: bytes = b""
    step: int = -1


class StepPlan(msgspec.Struct):
    """One step, applied in this order: frees, admits, block appends, writes, transfers out, copies,
    transfers in, body, head.

    lanes, q_len, n_logits, flags: int32 [R], one entry per row. A row's logit rows are its last
        `n_logits` positions. A generating row has q_len = n_logits = 1 + k, where k bounds the
        draft tokens that it verifies.
    block_appends, copies: one entry per KV group.
    writes: per-lane columns of features, {column: (lanes [n], values [n, ...])}. A column keeps its
        values until they are written again.
    dummy_tokens: positions to compute and throw away, so that ranks keep step with others. The body
        runs even if there are no rows.
    A plan without rows is legal: it moves blocks, and its result comes when some have arrived, or
    after a moment.

    **Drafts** are claims about text at absolute positions, in the columns `draft_ids`
    (int32 [n, W], padded with -1) and `draft_start` (int32 [n]): `draft_ids[j]` is the token at
    position `draft_start + j`. A row whose last known token stands at position p verifies the
    claimed tokens from p + 1 on, at most k of them, if the claim agrees with all known tokens that
    it covers; otherwise none. So a claim that is late or wrong costs time but never changes tokens.
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
        """Each logit row's line of `HeadInputs.mask`, -1 where there is none: int32 [sum n_logits].

        A GATED generating row has a line for each of its logit rows. A GATED PROMPT row has one for
        its last logit row, from which it samples.
        """
        waits = (self.flags & RowFlag.GATED) != 0
        ends = np.cumsum(self.n_logits)
        masked = np.repeat(waits & ((self.flags & RowFlag.PROMPT) == 0), self.n_logits)
        masked[ends[waits] - 1] = True
        return int32(np.where(masked, np.cumsum(masked) - 1, -1))


class HeadInputs(msgspec.Struct):
    """Masks for the head of a step with GATED rows. mask: uint32 bits as int32 [mask lines,
    ceil(vocab / 32)], in the order of `StepPlan.mask_lines`; a set bit allows the token."""

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
    """The output of a step, rows in the plan's order.

    tokens: int32 [R, K + 1], -1 where there is none.
    n_tokens: int32 [R], how many tokens each row accepted; 0 in mid-prompt.
    stop_reason: int32 [R], a `StopReason`.
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
    finished_transfers: list[int] = []
    failed_transfers: list[int] = []
    gpu_us: float = 0.0
