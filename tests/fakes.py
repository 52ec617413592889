"""An executor for the brain's tests: without a model, but with a KV store that checks the contents
of every slot.

The store keeps, for every slot, a hash of the token prefix that its KV was computed from. Each row
checks the KV it reads, and each write checks that no other row needs the slot. The next token is a
hash of the prefix, so a request's output depends on its prompt alone; `expected_output` computes it
without any engine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.executor import Capacity, WorkerCall
from quire.input_memory import InputMemory, InputShape
from quire.plan import (
    DRAFT_IDS,
    DRAFT_START,
    Admit,
    KVGroup,
    Logprobs,
    RowFlag,
    StepPlan,
    StepResult,
    StopReason,
    Transfer,
    claim_width,
)
from quire.request import Request

_MASK = (1 << 61) - 1
UNWRITTEN = -1
NEAR = ("host", "peer")
"""Places to which blocks are copied from the device."""


def mix(state: int, value: int) -> int:
    """A cheap hash of 61 bits (a multiply and a shift, as in splitmix64)."""
    x = (state * 0x9E3779B97F4A7C15 + value * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 29)


def salt_hash(salt: str) -> int:
    return sum((i + 1) * byte for i, byte in enumerate(salt.encode()))


def next_token(prefix: int, seed: int, sample_index: int, vocab: int) -> int:
    return mix(mix(prefix, seed), sample_index) % vocab


def expected_output(request: Request, vocab: int, stop_token: int | None) -> list[int]:
    """Returns the tokens that a request generates when it runs alone."""
    state = salt_hash(request.cache_salt)
    for token in request.tokens.view(0, request.prompt_len).tolist():
        state = mix(state, token)
    output: list[int] = []
    while request.prompt_len + len(output) < request.max_total:
        token = next_token(state, request.seed, request.sample_index, vocab)
        output.append(token)
        if token == stop_token:
            break
        state = mix(state, token)
    return output


class StoreError(AssertionError):
    """A plan would corrupt a real KV cache."""


@dataclass
class Lane:
    """The device's view of a lane."""

    admit: Admit
    tokens: list[int]
    prefixes: list[int]
    """For every known token, the hash of the tokens up to and including it."""
    position: int
    tables: list[dict[int, int]]
    stopped: bool = False

    def extend(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(mix(self.prefixes[-1], token))


@dataclass
class Work:
    """A row about to run."""

    lane: int
    state: Lane
    start: int
    length: int
    valid: int
    new: list[int] = field(default_factory=list)
    stop: StopReason = StopReason.NONE


@dataclass
class Move:
    """A transfer in progress: the step in which it ends, and its contents by block."""

    transfer: Transfer
    due: int
    data: list[Any]


class FakeExecutor:
    """An `Executor` that runs a step only when its result is collected: as late as possible, and so
    that changes to a submitted plan are noticed.

    `salt_of` returns the cache salt of a request id. Requests with different salts hash
    differently, so sharing between them is an error. Drafts come from the columns that plans write,
    and are verified. drafts, logit_rows: see `Capacity`.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        *,
        vocab: int = 50,
        stop_token: int | None = None,
        seed: int = 0,
        salt_of: Callable[[str], str] = lambda _: "",
        host_blocks: Sequence[int] = (),
        slowest: int = 3,
        failing: float = 0.0,
        drafts: int = 8,
        logit_rows: int | None = None,
    ) -> None:
        self.capacity = Capacity(
            tuple(groups),
            tuple(num_blocks),
            tuple(host_blocks),
            drafts=drafts,
            logit_rows=logit_rows,
        )
        self.draft_ids: dict[int, list[int]] = {}
        self.draft_starts: dict[int, int] = {}
        self.accepted_drafts = 0
        self.dummy_tokens = 0
        self.host: dict[tuple[str, int, int], Any] = {}
        self.files: dict[tuple[int, bytes], Any] = {}
        self._moving: list[Move] = []
        self._slowest = slowest
        self._failing = failing
        self.vocab = vocab
        self.stop_token = stop_token
        self.salt_of = salt_of
        self.lanes: dict[int, Lane] = {}
        self.store = [
            np.full(n * (1 if g.kind == "state" else g.tokens_per_block), UNWRITTEN, dtype=np.int64)
            for g, n in zip(groups, num_blocks, strict=True)
        ]
        self._queue: deque[StepPlan] = deque()
        self._random = random.Random(seed)
        self._garbage = 0
        self.steps = 0
        shape = InputShape(256, 1 + drafts, 1, 3 + drafts, claim_width(drafts))
        self.inputs = InputMemory(shape, np.zeros(shape.size, dtype=np.int8))

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def host_inputs(self) -> InputMemory:
        return self.inputs

    def call(self, call: WorkerCall[Any, Any], request: Any) -> Any:
        return None

    def shutdown(self) -> None:
        self._queue.clear()

    def collect(self) -> StepResult:
        plan = self._queue.popleft()
        self.steps += 1
        self.dummy_tokens += plan.dummy_tokens
        self._apply(plan)
        self._move(plan, "in")
        rows = [self._row(plan, i) for i in range(plan.num_rows)]
        alive = [work for work in rows if work.length]
        # New lanes may share blocks that this step computes; `_read` checks their contents.
        new = {admit.lane for admit in plan.admits}
        before = {n: state.position for n, state in self.lanes.items() if n not in new}
        for work in alive:
            self._write(work, before)
        for work in alive:
            self._read(work)
        for work in alive:
            work.state.position = work.start + work.valid
        result = self._result(plan, rows)
        result.finished_transfers, result.failed_transfers = self._arrive()
        return result

    # -- transfers -----------------------------------------------------------------------------

    def _move(self, plan: StepPlan, direction: str) -> None:
        """Begins transfers. Blocks that they write must not be read until they end."""
        for transfer in plan.transfers:
            if transfer.direction != direction:
                continue
            due = self.steps + self._random.randint(0, self._slowest)
            move = Move(transfer, due, self._source(transfer))
            if direction == "out" and transfer.place in NEAR:
                move.data = [block.copy() for block in move.data]
            if transfer.place in NEAR and direction == "in":
                self._blocks(transfer.group)[transfer.blocks] = self._waste()
            elif transfer.place in NEAR or direction == "in":
                for slot in self._slots(transfer):
                    self.host[slot] = np.full(self._size(transfer.group), self._waste())
            self._moving.append(move)

    def _source(self, transfer: Transfer) -> list[Any]:
        if transfer.place == "disk" and transfer.direction == "in":
            return [self.files.get((transfer.group, key.tobytes())) for key in transfer.keys]
        if transfer.place in NEAR and transfer.direction == "out":
            return list(self._blocks(transfer.group)[transfer.blocks])
        return [self.host[slot] for slot in self._slots(transfer)]

    def _slots(self, transfer: Transfer) -> list[tuple[str, int, int]]:
        """Returns names of the slots; a peer's slots and a tier's slots have different names."""
        memory = "peer" if transfer.place == "peer" else "host"
        return [(memory, transfer.group, slot) for slot in transfer.slots.tolist()]

    def _arrive(self) -> tuple[list[int], list[int]]:
        """Ends the transfers that are due; some of them fail."""
        finished: list[int] = []
        failed: list[int] = []
        due = [move for move in self._moving if move.due <= self.steps]
        self._moving = [move for move in self._moving if move.due > self.steps]
        for move in due:
            transfer = move.transfer
            missing = any(block is None for block in move.data)
            if missing or self._random.random() < self._failing:
                failed.append(transfer.id)
                continue
            self._check_still(move)
            if transfer.place == "peer" and transfer.direction == "out":
                # Such copies read blocks where they are, until they end.
                move.data = self._source(transfer)
            finished.append(transfer.id)
            for i, block in enumerate(move.data):
                if transfer.place in NEAR and transfer.direction == "in":
                    self._blocks(transfer.group)[transfer.blocks[i]] = block
                elif transfer.place == "disk" and transfer.direction == "out":
                    self.files[transfer.group, transfer.keys[i].tobytes()] = block.copy()
                else:
                    self.host[self._slots(transfer)[i]] = block.copy()
        return finished, failed

    def _check_still(self, move: Move) -> None:
        """Checks that no slot was written while it was read."""
        transfer = move.transfer
        reads_slots = (transfer.place in NEAR) == (transfer.direction == "in")
        if reads_slots and any(
            self.host[slot] is not block
            for slot, block in zip(self._slots(transfer), move.data, strict=True)
        ):
            raise StoreError("a slot was written while a transfer read it")

    def _blocks(self, group: int) -> Any:
        return self.store[group].reshape(-1, self._size(group))

    def _size(self, group: int) -> int:
        return 1 if self._is_state(group) else self.capacity.groups[group].tokens_per_block

    def _is_state(self, group: int) -> bool:
        return self.capacity.groups[group].kind == "state"

    def _waste(self) -> int:
        self._garbage += 1
        return -2 - self._garbage

    # -- the plan's bookkeeping ----------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        for lane in plan.frees:
            if self.lanes.pop(lane, None) is None:
                raise StoreError(f"lane {lane} was freed without a request")
        for admit in plan.admits:
            if admit.lane in self.lanes:
                raise StoreError(f"lane {admit.lane} was given away twice")
            self.lanes[admit.lane] = self._lane(admit)
        for group, appends in enumerate(plan.block_appends):
            at = 0
            for lane, start, count in zip(
                appends.lanes.tolist(),
                appends.starts.tolist(),
                appends.counts.tolist(),
                strict=True,
            ):
                table = self.lanes[lane].tables[group]
                for i, block in enumerate(appends.ids[at : at + count].tolist()):
                    if start + i in table and (start + i == 0 or not self._is_state(group)):
                        raise StoreError(f"lane {lane} got block {start + i} twice")
                    table[start + i] = block
                at += count
            if at != len(appends.ids):
                raise StoreError("counts of block appends do not add up")
        for lane, ids in zip(*plan.writes.get(DRAFT_IDS, ([], [])), strict=True):
            self.draft_ids[int(lane)] = ids.tolist()
        for lane, start in zip(*plan.writes.get(DRAFT_START, ([], [])), strict=True):
            self.draft_starts[int(lane)] = int(start)
        self._move(plan, "out")
        for group, copies in enumerate(plan.copies):
            store = self._blocks(group)
            store[copies.dst] = store[copies.src]

    def _lane(self, admit: Admit) -> Lane:
        prefixes, state = [], salt_hash(self.salt_of(admit.request_id))
        tokens = admit.tokens.tolist()
        for token in tokens:
            state = mix(state, token)
            prefixes.append(state)
        tables: list[dict[int, int]] = [{} for _ in self.capacity.groups]
        return Lane(admit, tokens, prefixes, admit.computed, tables)

    # -- rows ----------------------------------------------------------------------------------

    def _row(self, plan: StepPlan, i: int) -> Work:
        lane, length = int(plan.lanes[i]), int(plan.q_len[i])
        state, flags = self.lanes[lane], int(plan.flags[i])
        start = state.position
        if state.stopped:
            return Work(lane, state, start, 0, 0)
        if flags & RowFlag.PROMPT:
            end = start + length
            if end > len(state.tokens):
                raise StoreError(f"row of lane {lane} feeds tokens that nobody knows")
            work = Work(lane, state, start, length, length)
            if flags & RowFlag.SAMPLE:
                if end != len(state.tokens):
                    raise StoreError(f"row of lane {lane} samples in mid-prompt")
                self._sample(work, 1)
            return work
        if start != len(state.tokens) - 1 or not flags & RowFlag.SAMPLE:
            raise StoreError(f"lane {lane} generates at {start} of {len(state.tokens)} tokens")
        work = Work(lane, state, start, length, 0)
        drafts = self._drafts(state, lane)[: length - 1]
        self._sample(work, 1)
        for draft in drafts:
            if work.stop is not StopReason.NONE or draft != work.new[-1]:
                break
            self._sample(work, len(work.new) + 1)
            self.accepted_drafts += 1
        work.valid = len(work.new)
        return work

    def _drafts(self, state: Lane, lane: int) -> list[int]:
        """Returns the lane's claimed tokens after the last known one, if the claim matches all
        known tokens."""
        claim, start = self.draft_ids.get(lane, []), self.draft_starts.get(lane, 0)
        known = state.tokens[start:] if start >= 0 else []
        if not 0 <= start <= len(state.tokens) or claim[: len(known)] != known:
            return []
        drafts = claim[len(known) :]
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def _sample(self, work: Work, most: int) -> None:
        state, admit = work.state, work.state.admit
        while len(work.new) < most and work.stop is StopReason.NONE:
            token = next_token(state.prefixes[-1], admit.seed, admit.sample_index, self.vocab)
            work.new.append(token)
            state.extend(token)
            if token == self.stop_token:
                work.stop = StopReason.STOP_TOKEN
            elif len(state.tokens) >= admit.max_total:
                work.stop = StopReason.LENGTH
        state.stopped = work.stop is not StopReason.NONE

    def _slot(self, work: Work, group: int, position: int) -> int:
        size = self.capacity.groups[group].tokens_per_block
        block = work.state.tables[group].get(position // size)
        if block is None:
            raise StoreError(f"lane {work.lane} has no block for position {position}")
        return block * size + position % size

    def _write(self, work: Work, before: dict[int, int]) -> None:
        for group, store in enumerate(self.store):
            if self._is_state(group):
                self._advance_state(work, group)
                continue
            for i in range(work.length):
                slot = self._slot(work, group, work.start + i)
                self._check_alone(work, group, slot, before)
                if i < work.valid:
                    store[slot] = work.state.prefixes[work.start + i]
                else:
                    # A rejected draft leaves KV that nobody may read.
                    self._garbage += 1
                    store[slot] = -2 - self._garbage

    def _advance_state(self, work: Work, group: int) -> None:
        """Checks that the state is that of the tokens before the row, and advances it to the row's
        last token. Copies it to the slots in the table."""
        table, prefixes = work.state.tables[group], work.state.prefixes
        own, states = table[0], self.store[group]
        if work.start and states[own] != prefixes[work.start - 1]:
            raise StoreError(f"lane {work.lane} goes on from another state")
        for other, state in self.lanes.items():
            if other != work.lane and state.tables[group].get(0) == own:
                raise StoreError(f"lanes {work.lane} and {other} share a state")
        end = work.start + work.valid
        states[own] = prefixes[end - 1]
        for pair in range(1, self.capacity.groups[group].table_width(0), 2):
            if work.start < table[pair] <= end:
                states[table[pair + 1]] = prefixes[table[pair] - 1]

    def _check_alone(self, work: Work, group: int, slot: int, before: dict[int, int]) -> None:
        """Checks that no other lane needs the overwritten contents."""
        kv = self.capacity.groups[group]
        block, offset = divmod(slot, kv.tokens_per_block)
        for lane, other in self.lanes.items():
            if lane == work.lane or other.stopped or lane not in before:
                continue
            for index, held in other.tables[group].items():
                if held != block:
                    continue
                position = index * kv.tokens_per_block + offset
                oldest = 0 if kv.window is None else before[lane] - kv.window + 1
                relied = oldest <= position < before[lane]
                if relied and self.store[group][slot] == other.prefixes[position]:
                    raise StoreError(f"lane {work.lane} wrote into a block of lane {lane}")

    def _read(self, work: Work) -> None:
        """Checks that every attended position holds the hash of its own prefix."""
        for group, store in enumerate(self.store):
            if self._is_state(group):
                continue  # `_advance_state` has
            window = self.capacity.groups[group].window
            first = 0 if window is None else max(0, work.start - window + 1)
            for position in range(first, work.start + work.valid):
                held = store[self._slot(work, group, position)]
                if held != work.state.prefixes[position]:
                    what = "nothing" if held == UNWRITTEN else "another prefix"
                    raise StoreError(
                        f"lane {work.lane} read {what} at position {position}, group {group}"
                    )

    # -- the result ----------------------------------------------------------------------------

    def _result(self, plan: StepPlan, rows: list[Work]) -> StepResult:
        width = max([len(work.new) for work in rows] + [1])
        tokens: Int32 = np.full((len(rows), width), -1, dtype=np.int32)
        for i, work in enumerate(rows):
            tokens[i, : len(work.new)] = work.new
        return StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            n_tokens=int32([len(work.new) for work in rows]),
            stop_reason=int32([work.stop for work in rows]),
            prompt_logprobs=self._prompt_logprobs(plan, rows),
        )

    def _prompt_logprobs(self, plan: StepPlan, rows: list[Work]) -> Logprobs | None:
        """Returns values for the prompt's tokens only; each is the hash of the prefix that predicts
        it."""
        found = []
        for i, work in enumerate(rows):
            admit = work.state.admit
            if admit.params.prompt_logprobs is None or not int(plan.flags[i]) & RowFlag.PROMPT:
                continue
            end = work.start + work.length
            for position in range(end - int(plan.n_logits[i]) + 1, end + 1):
                if position < admit.prompt_len:
                    value = work.state.prefixes[position - 1] % 1000
                    found.append((i, position, work.state.tokens[position], value))
        if not found:
            return None
        row, position, token, value = zip(*found, strict=True)
        return Logprobs(
            rows=int32(row),
            positions=int32(position),
            ids=int32(token)[:, None],
            values=np.array(value, dtype=np.float32)[:, None],
            ranks=np.ones(len(found), dtype=np.int32),
        )
