"""The messages between the scheduler and the workers: a `StepPlan` down, a `StepResult` up.

Both are self-contained `msgspec` structs over int32 and float32 arrays, so that all ranks get a
plan as the same bytes. A **lane** is a running request's place in the device's batch state. A
**slot** is a token's place in the KV cache. A **row** is one request's part of one step.

The device tracks each lane's position by itself. An admission sets it to `Admit.computed`, a PROMPT
row advances it by `q_len`, and a generating row by the number of tokens that it accepts. So rows
carry no positions, and steps can be planned before earlier results are known.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from quire.arrays import Float32, Int16, Int32, int32
from quire.sampling_params import SamplingParams

DRAFT_IDS, DRAFT_START = "draft_ids", "draft_start"
"""Columns of draft tokens; see `StepPlan`."""


class RowFlag(enum.IntFlag):
    """Properties of a row.

    PROMPT: the host knows the row's tokens (prompt, or tokens of a resumed request).
    SAMPLE: the row's last logits give a new token (generating rows always sample).
    GATED: the step's head waits for inputs of the host (a grammar's mask).
    HELD: the row before was late, and its inputs are there. The row computes no position. Its head
        goes on from the hidden state that the lane kept.
    """

    PROMPT = 1
    SAMPLE = 2
    GATED = 4
    HELD = 8


class StopReason(enum.IntEnum):
    """Why a request ended on the device, or why its row gave no token.

    Stop strings are found later, in the text.

    BROKEN: a logit was not a number.
    LATE: the row's host inputs came too late, or an earlier row of the lane is late. The request
        goes on with a HELD row.
    """

    NONE = 0
    STOP_TOKEN = 1
    LENGTH = 2
    BROKEN = 3
    LATE = 4


NO_CLAIM = 2**30
"""The `draft_start` of a lane without drafts: beyond any text."""


def claim_width(drafts: int) -> int:
    """Returns the width of the column `draft_ids` if a row has up to `drafts` draft tokens.

    A claim is longer than that, because the text grows while steps are in flight.
    """
    return 4 * drafts


STATE_SAVES = 8
"""Most checkpoints that a row leaves."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV blocks are booked together.

    Attributes:
        layers: indices of the layers.
        kind: "full" keeps every position, "window" the last `window` positions. "state" is a
            recurrent state of fixed size; its blocks are slots of one state each.
        tokens_per_block: tokens of a block.
        block_bytes: bytes of a block, over all layers of the group, on one rank.
        window: positions that a window group keeps, or None.
    """

    layers: tuple[int, ...]
    kind: Literal["full", "window", "state"] = "full"
    tokens_per_block: int = 16
    block_bytes: int = 0
    window: int | None = None

    def table_width(self, length: int) -> int:
        """Returns the number of entries of a lane's block table.

        A state's table has the lane's slot, then pairs (position, slot): the body copies the state
        at that position to that slot.

        Args:
            length: longest sequence.
        """
        if self.kind == "state":
            return 1 + 2 * STATE_SAVES
        return -(-length // self.tokens_per_block)


class Admit(msgspec.Struct, array_like=True):
    """A request takes a lane.

    Attributes:
        lane_epoch: number of earlier requests of the lane. It identifies late messages for one of
            these.
        tokens: int32 [known], all tokens that the host knows. After a preemption, generated tokens
            follow the prompt.
        prompt_len: number of tokens of the prompt.
        computed: number of tokens whose KV is already in the lane's blocks.
        max_total: length at which the device reports `StopReason.LENGTH`. It includes the prompt.
        params: parameters for the device. Features may apply others (`Feature.device_params`).
        seed: seed of the random numbers.
        sample_index: number of the completion among the `n` of its prompt, a part of the random
            counter.
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
    """New entries of one group's block tables.

    Lane `lanes[i]` gets the next `counts[i]` of `ids`, at table indices from `starts[i]` on.
    """

    lanes: Int32
    starts: Int32
    counts: Int32
    ids: Int32


class BlockCopies(msgspec.Struct, array_like=True):
    """Copies of whole blocks within a group (copy-on-write), done in this order before the body.

    One copy may read a block that the same copy, a later one or the body overwrites. No copy reads
    a block that an earlier one has written.
    """

    src: Int32
    dst: Int32


class Transfer(msgspec.Struct, array_like=True):
    """A move of one group's blocks. Each rank moves its own heads.

    A move "out" reads blocks as earlier steps have left them; its own step may overwrite them. A
    move "in" has ended when `StepResult.finished_transfers` names it. Until then no step may read
    or write either end.

    Attributes:
        direction: "in" moves to the device, "out" from it.
        place: "host" is between device `blocks` and `slots` of the host's pool. "disk" is between
            `slots` of the host's pool and files named by `keys`. "peer" is between device `blocks`
            and `slots` of the memory between peers, or of the peer's memory.
        blocks: int32 [n].
        slots: int32 [n].
        keys: int32 [n, 4], the 16 bytes of each block's hash.
        source: description of the peer's memory, or b"".
        step: the peer's step that fills the blocks layer by layer. -1 if they are complete.
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

    A plan may have no rows. It then moves blocks, and its result comes when a transfer has ended,
    or after a moment.

    Attributes:
        lanes: int32 [R].
        q_len: int32 [R], positions that each row computes. A generating row has 1 + k, where k is
            the most draft tokens that it verifies. A HELD row has 1, a place of padding.
        n_logits: int32 [R]. A row's last `n_logits` positions are its logit rows. In a generating
            row these are all positions.
        flags: int32 [R], a `RowFlag` each.
        admits: requests that take lanes.
        frees: lanes that requests have left.
        block_appends: one per KV group.
        copies: one per KV group.
        writes: per-lane columns of features, {column: (lanes [n], values [n, ...])}. A column keeps
            its values until the next write.
        dummy_tokens: positions to compute and throw away, so that the rank takes part in a step of
            the others. The body runs even without rows.
        skew: in a step of generating rows, their longest context divided by their mean one. It
            decides only which kernels run.

    **Drafts** are claims about text at absolute positions, in the columns `draft_ids`
    (int32 [n, W], padded with -1) and `draft_start` (int32 [n]): `draft_ids[j]` is the token at
    position `draft_start + j`. Let p be the position of a row's last known token. If the claim
    agrees with all known tokens that it covers, the row verifies the claimed tokens from p + 1 on,
    at most k. Otherwise it verifies none. So a claim that is late or wrong costs time, but never
    changes tokens.
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
    skew: float = 1.0

    @property
    def num_rows(self) -> int:
        return len(self.lanes)

    @property
    def num_tokens(self) -> int:
        return int(self.q_len.sum()) + self.dummy_tokens

    @property
    def gated(self) -> bool:
        return bool((self.flags & (RowFlag.GATED | RowFlag.HELD)).any())


class Logprobs(msgspec.Struct):
    """Log-probabilities of M tokens, in row order.

    Attributes:
        rows: int32 [M], each token's row of the plan.
        positions: int32 [M], each token's position in its text.
        ids: int32 [M, 1 + W], the token itself, then the likeliest tokens. A row that asked for
            fewer than W is padded with -1.
        values: float32 [M, 1 + W], their log-probabilities.
        ranks: int32 [M], rank of the token itself; 1 is the likeliest.
    """

    rows: Int32
    positions: Int32
    ids: Int32
    values: Float32
    ranks: Int32


class DrawnTokens(msgspec.Struct):
    """Numbers about the draws of M new tokens, in row order.

    Attributes:
        rows: int32 [M], each token's row of the plan.
        raw: float32 [M], log-probabilities under the model's own logits.
        processed: float32 [M], log-probabilities under the distribution they were drawn from.
        sizes: int32 [M], number of tokens with a probability above 0 in that distribution.
    """

    rows: Int32
    raw: Float32
    processed: Float32
    sizes: Int32


class ChosenExperts(msgspec.Struct):
    """The experts of M positions, in row order.

    A position may come again: after a preemption, and where a draft was rejected. The last one that
    comes is valid, as with KV.

    Attributes:
        rows: int32 [M], each position's row of the plan.
        positions: int32 [M], in the row's text.
        ids: int16 [M, layers with experts, experts per token], the likeliest first.
    """

    rows: Int32
    positions: Int32
    ids: Int16


class Pooled(msgspec.Struct):
    """Vectors in place of tokens.

    Attributes:
        rows: int32 [M], rows of the plan, ascending.
        values: float32 [M, width]. With `counts`, the vectors of all rows, one after the other.
        counts: int32 [M], number of vectors of each row, or None for one each.
    """

    rows: Int32
    values: Float32
    counts: Int32 | None = None


class StepResult(msgspec.Struct):
    """The output of a step, with rows in the plan's order.

    Attributes:
        tokens: int32 [R, K + 1], each row's new tokens, padded with -1.
        n_tokens: int32 [R], number of new tokens. Rows in mid-prompt have 0.
        stop_reason: int32 [R], a `StopReason` each.
        logprobs: log-probabilities of new tokens, or None.
        prompt_logprobs: log-probabilities of prompt tokens, or None.
        pooled: vectors of rows whose prompt this step has pooled, or None.
        drawn: how new tokens were drawn, or None.
        experts: experts of the step's positions, or None.
        finished_transfers: ids of transfers finished since the last result.
        failed_transfers: ids of transfers failed since the last result. Their target blocks are
            undefined.
        gpu_us: microseconds that the step took on the device; 0 if it was not measured.
    """

    step_id: int
    tokens: Int32
    n_tokens: Int32
    stop_reason: Int32
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: Pooled | None = None
    drawn: DrawnTokens | None = None
    experts: ChosenExperts | None = None
    finished_transfers: list[int] = []
    failed_transfers: list[int] = []
    gpu_us: float = 0.0
