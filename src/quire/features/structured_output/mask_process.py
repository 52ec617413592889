"""The processes that build masks, on their side.

The first one loads the tokenizer, and forks one for each socket that it gets. They share its
memory, and nothing of the engine's: they import neither its loop nor PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections import deque

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
_LEAST_SLEEP, _MOST_SLEEP = 2e-5, 5e-4
_SLEEP_PART = 64
"""A process whose device takes longer than before sleeps this part of the time that it has
waited."""
_PERIODS = 8
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
    # The collector would visit all that was loaded, for milliseconds, and unshare its pages.
    gc.freeze()
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

    worker, pace = MaskWorker(compiler, inputs, report), Pace()
    while True:
        for message in channel.receive():
            worker.handle(decoder.decode(message))
        began = time.monotonic()
        if worker.turn():
            pace.work(began)
        channel.wait(pace.sleep(time.monotonic()) if worker.waits else None)


class Pace:
    """Says how long a process sleeps between two looks at what the device has written.

    Looks cost time of a core that others could use. So there are few of them long before the device
    is expected, and many about that moment.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._periods = deque[float](maxlen=_PERIODS)

    def work(self, now: float) -> None:
        """Notes that the device has given work at a moment, in seconds."""
        self._periods.append(now - self._last)
        self._last = now

    def sleep(self, now: float) -> float:
        """Returns the seconds to sleep."""
        # Some steps give work in two parts, and some take long.
        period = sorted(self._periods)[len(self._periods) // 4] if self._periods else 0.0
        waited = now - self._last
        return min(max(_LEAST_SLEEP, (period - waited) / 2, waited / _SLEEP_PART), _MOST_SLEEP)


if __name__ == "__main__":
    main()
