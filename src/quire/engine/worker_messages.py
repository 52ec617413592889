"""Messages between the engine and the processes of further ranks: MessagePack, no pickle."""

from __future__ import annotations

import msgspec

from quire.arrays import decode_array, encode_array
from quire.config import EngineConfig
from quire.engine.messages import Failure
from quire.executor import Measurement
from quire.plan import StepPlan


class Setup(msgspec.Struct, tag=True):
    """Makes a worker.

    config: with the rank's own device. rendezvous: the URL where ranks find each other.
    folder: of the memory that the ranks of the engine's machine share; None for those of others.
    timeout: seconds that a step may take.
    """

    config: EngineConfig
    rank: int
    world: int
    rendezvous: str
    folder: str | None
    timeout: float


class Measure(msgspec.Struct, tag=True):
    """Asks for a `Measurement`."""


class Allocate(msgspec.Struct, tag=True):
    """Makes the KV cache; answered by `Done`."""

    num_blocks: tuple[int, ...]


class Capture(msgspec.Struct, tag=True):
    """Gets the worker ready; answered by `Done`."""


class Run(msgspec.Struct, tag=True):
    """Launches a step; not answered."""

    plan: StepPlan


class Collect(msgspec.Struct, tag=True):
    """Waits for the oldest step; not answered, as all ranks have the same result."""


class Leave(msgspec.Struct, tag=True):
    """Releases the device and leaves the ranks, which all do at once; not answered."""


class Done(msgspec.Struct, tag=True):
    """Answers a call. measurement: of `Measure`."""

    measurement: Measurement | None = None


class Broken(msgspec.Struct, tag=True):
    """Says why a worker has ended."""

    failure: Failure


class Here(msgspec.Struct, tag=True):
    """Says which machine's worker has connected, and which of that machine's."""

    node_rank: int
    index: int


ToWorker = Setup | Measure | Allocate | Capture | Run | Collect | Leave
FromWorker = Done | Broken | Here
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_array)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_array)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _ENCODER.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _TO_WORKER.decode(data)  # type: ignore[no-any-return]


def decode_from_worker(data: bytes) -> FromWorker:
    return _FROM_WORKER.decode(data)  # type: ignore[no-any-return]
