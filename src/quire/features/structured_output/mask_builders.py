"""The builders of masks: a thread of the engine, or processes of their own."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from quire.errors import QuireError
from quire.features.structured_output.channel import MaskChannel
from quire.features.structured_output.compiler import Compiler, CompilerSetup
from quire.features.structured_output.mask_process import Fork
from quire.features.structured_output.mask_worker import MaskWorker
from quire.features.structured_output.messages import FromMasks, ToMasks
from quire.input_memory import InputMemory
from quire.system import python_command

_PATIENCE = 1.0
"""Seconds that the end of a thread or a process is waited for."""
_COMPILE_SECONDS = 0.02
"""Seconds between two looks at whether a compilation takes too long."""
_DEVICE_SECONDS = 1e-4
"""Seconds between two looks at what a device has written."""
_DEAD_SECONDS = 1e-3

Answer = tuple[int, FromMasks | None]
"""The number of a builder, and what it says; None: it has ended."""


class MaskBuilders(Protocol):
    """Some builders, by number.

    Attributes:
        count: Their number.
    """

    count: int

    def start(self, inputs: InputMemory, ended: Callable[[int], None]) -> None:
        """Starts them.

        Args:
            inputs: The memory that the steps' heads read.
            ended: Called again and again, on another thread, when a builder has ended, until
                `answers` says so.
        """
        ...

    def send(self, builder: int, message: ToMasks) -> None: ...

    def answers(self, seconds: float = 0.0) -> Sequence[Answer]:
        """Returns their answers, in order. Waits for some for up to so many seconds."""
        ...

    def close(self) -> None:
        """Ends them. Idempotent."""
        ...


class MaskThread:
    """One builder, on a thread of the engine's process.

    Args:
        device: Whether a device writes results while the host does other things.
    """

    count = 1

    def __init__(self, compiler: Compiler, *, device: bool) -> None:
        self.compiler = compiler
        self._device = device
        self._messages = SimpleQueue[ToMasks | None]()
        self._answers = deque[Answer]()
        self._changed, self._answered = threading.Event(), threading.Event()
        compiler.warm_up()

    def start(self, inputs: InputMemory, ended: Callable[[int], None]) -> None:
        inputs.on_arrival = self._changed.set
        self.worker = MaskWorker(self.compiler, inputs, self._report, self._changed.set)
        # It may wait for a step that never runs, which must not keep a program from ending.
        args = self.worker, self._messages, self._changed, self._device
        thread = threading.Thread(target=_run_thread, args=args, name="masks", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end_thread, self._messages, self._changed, thread)

    def _report(self, message: FromMasks) -> None:
        self._answers.append((0, message))
        self._answered.set()

    def send(self, builder: int, message: ToMasks) -> None:
        self._messages.put(message)
        self._changed.set()

    def answers(self, seconds: float = 0.0) -> Sequence[Answer]:
        if seconds and not self._answers:
            self._answered.wait(seconds)
        self._answered.clear()
        found = list[Answer]()
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def close(self) -> None:
        self._end()
        self.compiler.shutdown()


def _run_thread(
    worker: MaskWorker,
    messages: SimpleQueue[ToMasks | None],
    changed: threading.Event,
    device: bool,
) -> None:
    while True:
        changed.clear()
        try:
            while True:
                message = messages.get_nowait()
                if message is None:
                    return
                worker.handle(message)
        except Empty:
            pass
        if worker.turn():
            continue
        if device and worker.waits:
            changed.wait(_DEVICE_SECONDS)
        else:
            changed.wait(_COMPILE_SECONDS if worker.compiles else None)


def _end_thread(
    messages: SimpleQueue[ToMasks | None], changed: threading.Event, thread: threading.Thread
) -> None:
    """Ends the thread, which must not wake while the interpreter ends."""
    messages.put(None)
    changed.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


class MaskProcesses:
    """Builders in processes of their own, which the interpreter's lock of the engine does not hold
    up. A process that ends is replaced.

    Args:
        setup: How each makes its compiler.
        count: Their number.
    """

    def __init__(self, setup: CompilerSetup, count: int) -> None:
        self.count = count
        self._control, theirs = socket.socketpair()
        command = python_command(
            "quire.features.structured_output.mask_process",
            str(theirs.fileno()),
            msgspec.json.encode(setup).decode(),
        )
        # NumPy's threads would not survive the fork.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromMasks)
        self._channels = list[MaskChannel]()
        self._watches = list[_Watch]()
        self._poll = select.poll()
        self._closed = False

    def start(self, inputs: InputMemory, ended: Callable[[int], None]) -> None:
        self._inputs, self._ended = inputs, ended
        for builder in range(self.count):
            self._start(builder)

    def _start(self, builder: int) -> None:
        """Starts a process."""
        if self._inputs.file is None:
            raise QuireError("the memory of masks has no file that processes could map")
        file, start = self._inputs.file
        ours, theirs = socket.socketpair()
        fork = msgspec.json.encode(Fork(self._inputs.shape, start))
        # Without the first process there is no other, and the channel is closed at once.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [fork], [file, theirs.fileno()])
        self._poll.register(ours, select.POLLIN)
        self._channels[builder:] = [MaskChannel(ours), *self._channels[builder + 1 :]]
        watch = _Watch(ours.dup(), partial(self._ended, builder))
        self._watches[builder:] = [watch, *self._watches[builder + 1 :]]

    def send(self, builder: int, message: ToMasks) -> None:
        self._channels[builder].send(self._encoder.encode(message))

    def answers(self, seconds: float = 0.0) -> Sequence[Answer]:
        found = list[Answer]()
        ready = {file for file, _ in self._poll.poll(1000 * seconds)}
        for builder, channel in enumerate(self._channels):
            if channel.socket.fileno() not in ready:
                channel.flush()
                continue
            try:
                data = channel.receive()
            except EOFError:
                found.append((builder, None))
                self._replace(builder)
            else:
                found += [(builder, self._decoder.decode(each)) for each in data]
        return found

    def _replace(self, builder: int) -> None:
        channel = self._channels[builder]
        self._poll.unregister(channel.socket)
        channel.close()
        self._watches[builder].stop()
        self._start(builder)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel, watch in zip(self._channels, self._watches, strict=True):
            watch.stop()
            channel.close()
        self._control.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Watch:
    """Waits for the end of a builder, on a thread. Then the device may wait for masks that nobody
    builds, and the engine's thread for the device.

    Args:
        end: The builder's socket.
        ended: Called again and again after its end.
    """

    def __init__(self, end: socket.socket, ended: Callable[[], None]) -> None:
        self._end, self._ended = end, ended
        self._lock, self._stopped = threading.Lock(), False
        threading.Thread(target=self._run, name="mask watch", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        poll.poll()
        self._end.close()
        while True:
            with self._lock:
                if self._stopped:
                    return
                self._ended()
            time.sleep(_DEAD_SECONDS)

    def stop(self) -> None:
        """Stops the calls. None runs any more."""
        with self._lock:
            self._stopped = True
