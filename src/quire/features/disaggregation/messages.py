"""A connection between engines. It carries messages, each after its length, and raw blocks."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from quire.features.disaggregation.facts import KVFacts

_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 20
"""Size limit of a message without its blocks."""


class BrokenMessageError(Exception):
    """The bytes that arrived over a connection are not a valid message."""


class PeerChannel:
    """Sends and receives messages on a connected socket.

    One thread may send while another receives. Any thread may call `end`.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError if the peer is gone."""
        data = encoder.encode(message)
        self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def send_block(self, block: memoryview) -> None:
        self._socket.sendall(block)

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            OSError: the connection has ended, or the time limit has passed (TimeoutError).
            BrokenMessageError: the bytes are not a valid message.
        """
        head = bytearray(_LENGTH_BYTES)
        self.receive_into(memoryview(head))
        size = int.from_bytes(head, "little")
        if size > _MOST_BYTES:
            raise BrokenMessageError(f"a message of {size} bytes")
        data = bytearray(size)
        self.receive_into(memoryview(data))
        try:
            return decode(bytes(data))
        except msgspec.DecodeError as error:
            raise BrokenMessageError(str(error)) from None

    def receive_into(self, data: memoryview) -> None:
        """Fills `data` with the next bytes. Raises OSError as `receive` does."""
        while len(data):
            count = self._socket.recv_into(data)
            if not count:
                raise ConnectionResetError("the peer has ended the connection")
            data = data[count:]

    def end(self) -> None:
        """Ends the connection in both directions. Waiting calls return. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()


# Messages between engines: grants go over HTTP, and their blocks over a connection.


class PromptRequest(msgspec.Struct, frozen=True):
    """Asks for the KV of a prompt; the body of `POST /kv/prefill`.

    Attributes:
        tokens: The prompt's tokens; in whole blocks for models with recurrent states.
        first: Number of leading blocks that the reader has.
        reader: Identifies the asking engine until it ends.
        epoch: Identifies the answering engine, as in its handshake.
        cache_salt: See `Request`.
        layers: Whether the reader can read the answering engine's clock. If so, it also gets
            blocks before all of their layers are written.
        weights: Id of the reader's weights, "" before their first update.
    """

    tokens: list[int]
    first: int
    reader: str
    epoch: str
    cache_salt: str = ""
    layers: bool = False
    weights: str = ""


class Grant(msgspec.Struct, frozen=True):
    """The right to fetch the KV of one prompt, once.

    Attributes:
        name: secret random text.
        epoch: identifies the granting engine until it ends.
        generation: number of the grant among the engine's grants.
        reader: engine that may use the grant.
        lease: seconds until the reader must connect.
        port: port for the connection, on the granting engine's host.
    """

    name: str
    epoch: str
    generation: int
    reader: str
    lease: float
    port: int


class ClosedGrant(msgspec.Struct, frozen=True):
    """The end of a grant.

    Attributes:
        name: the grant's name.
        outcome: one of `OUTCOMES`.
        computed: seconds from the grant until the prompt was computed; 0 if it never was.
        seconds: seconds from the grant until its end.
    """

    name: str
    outcome: str
    computed: float
    seconds: float


class Welcome(msgspec.Struct, frozen=True):
    """Answers a handshake: the engine's facts, its epoch, and a description of its cache for
    transports that read the cache itself; see `Transfer.source`."""

    facts: KVFacts
    epoch: str
    memory: bytes = b""


class MemoryHandle(msgspec.Struct, frozen=True):
    """Memory that a reader on the same host can map; see `SharedMemory`.

    Attributes:
        starts: byte offset of each group's first slot.
        sizes: bytes of a slot of each group.
    """

    pid: int
    descriptor: int
    size: int
    token: bytes
    starts: list[int]
    sizes: list[int]


class OpenGrant(msgspec.Struct, tag=True):
    """The reader's first message, which shows its grant."""

    grant: Grant


class GrantAccepted(msgspec.Struct, tag=True):
    """Answers `OpenGrant`. Blocks will follow.

    Attributes:
        memory: Memory between engines; None: the reader reads blocks in the writer's cache.
    """

    memory: MemoryHandle | None


class MapReply(msgspec.Struct, tag=True):
    """Answers `GrantAccepted`. It tells whether the reader can map the memory."""

    shared: bool


class GrantRefused(msgspec.Struct, tag=True):
    """Ends a connection without sending the blocks. status: an HTTP status."""

    status: int
    reason: str


class KeepAlive(msgspec.Struct, tag=True):
    """Tells the reader that its prompt is still being computed."""


class BlockBatch(msgspec.Struct, tag=True):
    """Blocks `first` to `first` + `count` - 1 of a group's table.

    Attributes:
        slots: the blocks' slots in shared memory, or their numbers in the writer's cache. None:
            their bytes follow the message.
        step: the writer's step that fills the blocks layer by layer; -1: they are filled.
    """

    number: int
    group: int
    first: int
    count: int
    slots: list[int] | None = None
    step: int = -1


class BatchAck(msgspec.Struct, tag=True):
    """Acknowledges a batch: the reader has read it, so its memory may be used again."""

    number: int


class End(msgspec.Struct, tag=True):
    """Reports that all blocks have been sent.

    Attributes:
        computed: seconds from the grant until the prompt was computed.
    """

    computed: float


Message = (
    OpenGrant | GrantAccepted | MapReply | GrantRefused | KeepAlive | BlockBatch | BatchAck | End
)

encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Returns a decoded message. Raises msgspec.DecodeError if the data is not a message."""
    message: Message = _decoder.decode(data)
    return message
