"""Commands to all ranks, which an entry of a plan carries.

All ranks carry out a command before the body of the same step. Then they agree whether all of them
have succeeded.
"""

from __future__ import annotations

import msgspec
import numpy as np

from quire.arrays import Int32
from quire.features.weight_updates.calls import Tag
from quire.features.weight_updates.payloads import JoinGroup, Source

ENTRY = "weight_updates"
"""The plan's entry."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Begins to open a source, and to check it against the model, in a thread.

    Attributes:
        number: number of the update.
        whole: see `UpdateWeights`.
    """

    number: int
    source: Source
    whole: bool = False


class AwaitThread(msgspec.Struct, frozen=True, tag="await_thread"):
    """Waits for the thread of an earlier command."""

    number: int


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Writes an update that is prepared, and closes its source."""

    number: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Closes the source of an update that will not be written."""

    number: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Begins to join a trainer's group in a thread, which waits for all of its members.

    Attributes:
        number: number for `AwaitThread`.
    """

    number: int
    group: JoinGroup


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave_group"):
    """Leaves a trainer's group."""

    group: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Gives memory up; see `Sleep`."""

    level: int
    tags: tuple[Tag, ...]


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Takes memory again. read: whether weights must be read again from the model's files."""

    tags: tuple[Tag, ...]
    read: bool


Command = Prepare | AwaitThread | Write | Drop | Join | LeaveGroup | Release | Restore
_decoder = msgspec.json.Decoder(Command)


def encode(command: Command) -> Int32:
    """Returns a command as a line of a plan's entry, int32 [1, n], with a byte in each word."""
    return np.frombuffer(msgspec.json.encode(command), dtype=np.uint8).astype(np.int32)[None]


def decode(line: Int32) -> Command:
    """Returns the command of a line, int32 [n]."""
    command: Command = _decoder.decode(line.astype(np.uint8).tobytes())
    return command
