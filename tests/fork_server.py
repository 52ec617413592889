"""Starts processes of Quire by a fork of one that has imported what they need.

A process of Quire spends most of its start in imports, and tests start hundreds. If a test or one
of its processes starts `python -m quire...`, a fork server makes the new process. The new process
is a child of the caller. It has the arguments, environment, folder and descriptors of a normal
start. Each such process also gets its own fork server, forked before the process does anything.
Other programs start normally, and so do processes with variables that libraries read on import.

`BARE`, set in the environment, asks for a start from a bare interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar

BARE = "QUIRE_TESTS_START_BARE"
_ROOT = Path(__file__).parents[1]
_PREFIXES = ("CUDA", "HF_", "MKL", "OMP_NUM", "OPENBLAS", "PROMETHEUS", "PYTHON", "TRITON")
"""Begin the names of variables that libraries and the interpreter read at the start."""
_MOST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 64
_HIGH = 512
"""The least number of descriptors on their way to their own."""
_PR_SET_CHILD_SUBREAPER = 36
_RANKS_IMPORT = [
    "torch.distributed", "quire.models", "quire.parallel.torch_group",
    "tests.features.lora.test_logits", "tests.models.test_experts_parallel",
]  # fmt: skip
_COMMAND = [sys.executable, "-m", "tests.fork_server"]
_COMMAND_BYTES = 4096
"""Room for the command lines that processes show."""
_Popen = subprocess.Popen


def use() -> None:
    """Makes this process start Quire's processes by forks from now on.

    The first start also starts the fork server.
    """
    ForkedProcess.environment = _read_at_imports(os.environ)
    subprocess.Popen = ForkedProcess  # type: ignore[misc]


def context() -> ForkServerContext:
    """Returns a context that starts tests' functions in forks of a process with the ranks'
    imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_RANKS_IMPORT)
    return context


def _start() -> socket.socket:
    """Starts a fork server, and returns a connection to it."""
    ours, theirs = _pair()
    with theirs:
        end = str(theirs.fileno())
        _Popen(
            [*_COMMAND, end, " " * _COMMAND_BYTES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
            env={**os.environ, **ForkedProcess.environment, "PYTHONUNBUFFERED": "1"},
        )
    return ours


class ForkedProcess(_Popen):  # type: ignore[type-arg]
    """A `Popen` that forks its process if the result is the same."""

    server: socket.socket | None = None
    environment: ClassVar[dict[str, str]] = {}
    """Variables that the fork server's imports read."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
                       pass_fds: Any, cwd: Any, env: Any, *rest: Any) -> None:  # fmt: skip
        (_, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid,
         umask, new_session, process_group) = rest  # fmt: skip
        variables = {str(k): str(v) for k, v in (os.environ if env is None else env).items()}
        words = [] if isinstance(args, (str, bytes)) else [str(word) for word in args]
        plain = preexec_fn is executable is gid is gids is uid is None and umask < 0
        same = BARE not in variables and _read_at_imports(variables) == self.environment
        there = cwd is None or os.path.isdir(cwd)
        if not (plain and same and there and close_fds and not shell and _is_quire(words)):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        if self.server is None:
            _adopt_orphans()
            ForkedProcess.server = _start()
        request = {
            "command": words,
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": variables,
            "new_session": bool(new_session),
            "process_group": process_group if process_group >= 0 else os.getpgrp(),
            "descriptors": [0, 1, 2, *pass_fds],
        }
        given = [p2cread, c2pwrite, errwrite]
        given = [standard if fd < 0 else fd for standard, fd in enumerate(given)]
        socket.send_fds(self.server, [json.dumps(request).encode()], [*given, *pass_fds])
        self.pid = int(self.server.recv(64))
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def _is_quire(words: list[str]) -> bool:
    plain = _without_flag(words)
    return plain[:2] == [sys.executable, "-m"] and plain[2].partition(".")[0] == "quire"


def _without_flag(words: list[str]) -> list[str]:
    """Returns a command of Python without its `-P` option."""
    return words[:1] + words[2:] if words[1:2] == ["-P"] else words


def _read_at_imports(variables: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_PREFIXES) and name != "PYTHONUNBUFFERED"
    }


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _main(connection: socket.socket) -> None:
    """Runs the fork server; in each fork, runs the forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _show(_COMMAND)
    _import_all()
    gc.collect()
    gc.freeze()
    _run(*_forks(connection))


def _import_all() -> None:
    """Imports the modules of Quire's processes, except those run as `__main__`."""
    import quire.cli.main
    import quire.cli.serve
    import quire.engine.loop.features
    import quire.engine.process.client
    import quire.engine.ranks.ranks
    import quire.server.process.server  # noqa: F401


def _forks(connection: socket.socket) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Answers each request with a fork. Returns only in the forks: the request, its descriptors,
    and the connection for the answer."""
    while True:
        data, given, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for descriptor in given:
                os.close(descriptor)
            continue
        # The parent ends immediately, so that the caller becomes the parent of the process.
        pid = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == pid:
            time.sleep(0.0002)
        request = json.loads(data)
        if request["new_session"]:
            os.setsid()
        else:
            os.setpgid(0, request["process_group"])
        _adopt_orphans()
        ours, theirs = _pair()
        if os.fork() == 0:
            connection.close()
            ours.close()
            _close_all_but(theirs.fileno())
            connection = theirs
            continue
        theirs.close()
        ForkedProcess.server = ours
        return connection, request, given


def _run(connection: socket.socket, request: dict[str, Any], given: list[int]) -> None:
    """Turns the fork into the requested process."""
    command = request["command"]
    _show(command)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in given]
    server = ForkedProcess.server = _moved(ForkedProcess.server)
    connection = _moved(connection)
    for descriptor, number in zip(high, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
    _close_all_but(server.fileno(), connection.fileno(), *request["descriptors"])
    os.environ.clear()
    os.environ.update(request["environment"])
    use()
    os.chdir(request["cwd"])
    plain = _without_flag(command)
    sys.path[:1] = [request["cwd"]] if plain == command else []
    sys.argv = ["-m", *plain[3:]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with connection:
        connection.send(str(os.getpid()).encode())
    status: Any = 0
    try:
        runpy.run_module(plain[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    if isinstance(status, int):
        _end(status)
    sys.exit(status)


def _end(status: int) -> None:
    """Ends the process as the interpreter does, but without tearing down modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _moved(server: socket.socket) -> socket.socket:
    with server:
        return socket.socket(fileno=fcntl.fcntl(server, fcntl.F_DUPFD_CLOEXEC, _HIGH))


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError:
                continue  # what listed the folder


def _show(command: list[str]) -> None:
    """Sets this process's command line, so that tests can find it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(word.encode() for word in command)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    from tests import fork_server

    fork_server._main(socket.socket(fileno=int(sys.argv[1])))
