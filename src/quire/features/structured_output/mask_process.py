"""The processes that build masks, on their side.

The first one loads the tokenizer, and forks one for each socket that it gets. They share its
memory, and nothing of the engine's: they import neither its loop nor PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time

import msgspec

from quire.features.structured_output.args import MOST_PROCESSES
from quire.features.structured_output.channel import MaskChannel
from quire.features.structured_output.compiler import Compiler, CompilerSetup
from quire.features.structured_output.mask_worker import MaskWorker
from quire.features.structured_output.messages import FromMasks, ToMasks
from quire.input_memory import InputMemory, InputShape, map_file

_MOST_BYTES = 4096
_SWITCH_SECONDS = 1e-4
"""A thread that compiles lets masks be built after this time."""
_LEAST_SLEEP, _MOST_SLEEP = 2e-5, 1e-3
_SLEEP_PART = 32
"""A process that waits for the device sleeps this part of the time that it has waited."""
_PR_SET_TIMERSLACK = 29


class Fork(msgspec.Struct, frozen=True):
    """Asks for a process for each socket that comes with it, behind the memory's file.

    Attributes:
        shape: The sizes of the engine's memory.
        start: Where in the file the memory begins.
    """

    shape: InputShape
    start: int


def main() -> None:
    control, setup = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=CompilerSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sharpen_sleeps()
    compiler = setup.open()
    compiler.load()
    with socket.socket(fileno=control) as engine:
        while True:
            data, files, _, _ = socket.recv_fds(engine, _MOST_BYTES, 1 + MOST_PROCESSES)
            if not data:
                return
            for own in files[1:]:
                if not os.fork():
                    engine.close()
                    for other in files[1:]:
                        if other != own:
                            os.close(other)
                    with contextlib.suppress(EOFError):
                        build_masks(compiler, msgspec.json.decode(data, type=Fork), files[0], own)
                    os._exit(0)
            for file in files:
                os.close(file)


def sharpen_sleeps() -> None:
    """Lets short sleeps end in time. Linux may lengthen them by 50 microseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


def build_masks(compiler: Compiler, fork: Fork, file: int, end: int) -> None:
    """Builds masks until the engine closes the socket.

    Raises:
        EOFError: it has.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    inputs = InputMemory(fork.shape, map_file(file, fork.start, fork.shape.size), remote=True)
    channel = MaskChannel(socket.socket(fileno=end))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToMasks)

    def report(message: FromMasks) -> None:
        channel.send(encoder.encode(message))

    worker, last = MaskWorker(compiler, inputs, report), time.monotonic()
    while True:
        messages = channel.receive()
        for message in messages:
            worker.handle(decoder.decode(message))
        now = time.monotonic()
        if worker.turn() or messages:
            last = now
        if worker.waits:
            sleep = min(max(_LEAST_SLEEP, (now - last) / _SLEEP_PART), _MOST_SLEEP)
            channel.wait(sleep)
        else:
            channel.wait(None)


if __name__ == "__main__":
    main()
