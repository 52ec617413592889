"""Messages between the engine and those who build masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from quire.arrays import Int32
from quire.errors import CompilerBusyError, GrammarError, QuireError
from quire.sampling_params import StructuredOutputsParams

Ends = list[tuple[tuple[int, ...], int]]
"""Pairs of end tokens and the length up to which they are forbidden."""


class MaskParams(msgspec.Struct, frozen=True, array_like=True):
    """The parameters that a request's masks depend on.

    Attributes:
        grammar: Its grammar, or None.
        prompt_len: Number of tokens before its text.
        ends: The end tokens that are forbidden at first.
        allowed: `SamplingParams.allowed_token_ids`.
        bad: `SamplingParams.bad_token_ids`.
        repeated: Whether requests before had the same grammar.
        forced: Whether text that the grammar forces is looked for.
    """

    grammar: StructuredOutputsParams | None
    prompt_len: int
    ends: Ends = []
    allowed: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    repeated: bool = False
    forced: bool = False


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request has arrived. Its grammar is compiled from now on."""

    key: int
    params: MaskParams


class Enter(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request gets a lane.

    Attributes:
        turn: Number of requests with masks that had the lane before.
        tail: Its last tokens, as bytes of int32: its text, and the end of its prompt.
        known: Number of its tokens.
    """

    key: int
    lane: int
    turn: int
    tail: bytes
    known: int


class GatedRow(NamedTuple):
    """A row that waits for masks.

    Attributes:
        key: Its request's.
        place: The row's place in its step; -1: it is known to be late.
        lines: Number of its masks: one for its next token and one after each draft.
        epoch: The number of late rows in the lane. Rows behind a late one have the same.
        held: Whether its masks are there, as are those of a row that continues a late one.
    """

    key: int
    place: int
    lines: int
    epoch: int
    held: int


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A step was planned with these rows.

    Attributes:
        rows: int32 [rows, 5] as bytes, each row a `GatedRow`.
    """

    step_id: int
    rows: bytes

    @classmethod
    def of(cls, step_id: int, rows: Int32) -> Rows:
        return cls(step_id, rows.tobytes())

    def read(self) -> Iterator[GatedRow]:
        rows = np.frombuffer(self.rows, np.int32).reshape(-1, len(GatedRow._fields))
        return map(GatedRow._make, rows.tolist())


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request gives its lane back. Attributes as of `Enter`."""

    key: int
    lane: int
    turn: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A request has ended."""

    key: int


ToMasks = Open | Enter | Rows | Leave | Close


# -- answers -------------------------------------------------------------------------------------


class MaskStats(msgspec.Struct, array_like=True):
    """Counts since the start, see `GrammarStats`."""

    compiles: int = 0
    compile_seconds: float = 0.0
    mask_lookups: int = 0
    mask_hits: int = 0


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request's grammar is compiled."""

    key: int


class MaskFailure(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request's grammar cannot be compiled or followed.

    Attributes:
        step_id: The step whose row has no mask; -1: it has not come to that.
        busy: Whether it is a `CompilerBusyError`. Others are a `GrammarError`, with the attributes
            between.
    """

    key: int
    message: str
    step_id: int = -1
    param: str | None = None
    code: str | None = None
    pointer: str | None = None
    busy: bool = False

    @classmethod
    def of(cls, key: int, error: QuireError, step_id: int = -1) -> MaskFailure:
        if isinstance(error, GrammarError):
            return cls(key, str(error), step_id, error.param, error.code, error.pointer)
        return cls(key, str(error), busy=True)

    def error(self) -> QuireError:
        if self.busy:
            return CompilerBusyError(self.message)
        return GrammarError(self.message, self.param, self.code, self.pointer)


class Forced(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The grammar forces these tokens from a position on."""

    key: int
    start: int
    tokens: tuple[int, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request's results were overwritten before they were read. It must enter its lane again."""

    key: int


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The counts of one builder."""

    stats: MaskStats


FromMasks = Compiled | MaskFailure | Forced | Lost | Stats
