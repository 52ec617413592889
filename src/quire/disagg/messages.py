"""Messages between engines: grants over HTTP, and what fetches their blocks over a connection."""

from __future__ import annotations

import msgspec

from quire.disagg.facts import KVFacts


class PromptRequest(msgspec.Struct, frozen=True):
    """Asks for the KV of a prompt; the body of `POST /kv/prefill`.

    tokens: whole blocks of them. cache_salt: see `Request`. first: blocks that the reader has.
    reader: names the engine that asks, for its life. epoch: of the engine that answers, as its
    handshake told. layers: whether the reader can read that engine's clock, and so blocks whose
    layers are yet to be written.
    """

    tokens: list[int]
    first: int
    reader: str
    epoch: str
    cache_salt: str = ""
    layers: bool = False


class Grant(msgspec.Struct, frozen=True):
    """The right to fetch the KV of one prompt, once.

    name: not to be guessed. epoch: names the engine that gave it, for its life. generation: counts
    its grants. reader: who may use it. lease: seconds in which the reader must show itself.
    port: of the connection, on the host that was asked.
    """

    name: str
    epoch: str
    generation: int
    reader: str
    lease: float
    port: int


class ClosedGrant(msgspec.Struct, frozen=True):
    """The end of a grant by `name`. outcome: see `OUTCOMES`. computed: seconds until the prompt was
    computed, 0 where it was not. seconds: until the end."""

    name: str
    outcome: str
    computed: float
    seconds: float


class Welcome(msgspec.Struct, frozen=True):
    """Answers a handshake: the engine's facts, its epoch, and where its blocks are for a transport
    that reads them there; see `Transfer.source`."""

    facts: KVFacts
    epoch: str
    memory: bytes = b""


class MemoryHandle(msgspec.Struct, frozen=True):
    """Memory that a reader on the same host can map; see `SharedMemory`. starts, sizes: by group,
    where slots begin and their bytes."""

    pid: int
    descriptor: int
    size: int
    token: bytes
    starts: list[int]
    sizes: list[int]


class Redeem(msgspec.Struct, tag=True):
    """The reader's first message: shows its grant."""

    grant: Grant


class Accepted(msgspec.Struct, tag=True):
    """Answers `Redeem`: blocks will come. memory: between engines; None where blocks are read where
    they are."""

    memory: MemoryHandle | None


class Mapped(msgspec.Struct, tag=True):
    """Answers `Accepted`: whether the reader can map the memory."""

    shared: bool


class Refused(msgspec.Struct, tag=True):
    """Ends a connection without the blocks. status: as HTTP has it."""

    status: int
    reason: str


class Working(msgspec.Struct, tag=True):
    """Tells the reader that its prompt is still being computed."""


class BlockBatch(msgspec.Struct, tag=True):
    """Blocks `first` to `first` + `count` - 1 of a group's table.

    slots: where they are in shared memory, or blocks of the writer's cache; None: their bytes
        follow the message.
    step: of the writer, which fills blocks of its cache layer by layer; -1: they are filled.
    """

    number: int
    group: int
    first: int
    count: int
    slots: list[int] | None = None
    step: int = -1


class Taken(msgspec.Struct, tag=True):
    """Tells that a batch was read: its memory may be used again."""

    number: int


class End(msgspec.Struct, tag=True):
    """Tells that all blocks have been sent. computed: seconds from the grant to the prompt's
    end."""

    computed: float


Message = Redeem | Accepted | Mapped | Refused | Working | BlockBatch | Taken | End

encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Raises msgspec.DecodeError where the data is no message."""
    message: Message = _decoder.decode(data)
    return message
