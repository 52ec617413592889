"""Measures the time from the command to the first token, in a fresh process each time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ConfigError, QuireError
from quire.system import python_command

PHASES = ("python_s", "import_s", "weights_s", "capture_s", "rest_s", "generate_s")
"""Phases of a start: the interpreter, imports, weights, graph capture, the rest of building the
engine, and one `generate`. They add up to `first_token_s`."""


def command(settings: Mapping[str, Any]) -> list[str]:
    """Returns the command that starts Quire with these fields of `EngineArgs`."""
    return python_command("quire.tools.bench.first_token", json.dumps(settings))


def case_name(load_format: str, *, cold: bool) -> str:
    """Returns the case's name. It has no suffix for random weights, because the figures of other
    engines are for these."""
    name = "startup" if load_format == "dummy" else "startup-files"
    return name + "-cold" if cold else name


def measure(command: Sequence[str], *, cold: bool, repeat: int, timeout: float) -> dict[str, Any]:
    """Returns the phases of the fastest start, its `first_token_s`, and the `device`.

    Args:
        command: starts an engine in the same way as `quire.tools.bench.first_token`.
        cold: each start has an empty kernel cache. Otherwise a first start, which does not count,
            fills the cache.
        repeat: number of starts.
        timeout: time limit of a start, in seconds.

    Raises:
        ConfigError: the engine refuses the settings.
        QuireError: a start failed or took too long.
    """
    if not cold:
        _start(command, dict(os.environ), timeout)
    runs = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="quire-cold-") as folder:
            environment = dict(os.environ)
            if cold:
                environment["TRITON_CACHE_DIR"] = folder
            runs.append(_start(command, environment, timeout))
    return min(runs, key=lambda run: run["first_token_s"])


def _start(command: Sequence[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as child,
    ):
        expired = threading.Event()

        def end() -> None:
            expired.set()
            child.kill()

        late = threading.Timer(timeout, end)
        late.start()
        answer, ended = "", began
        try:
            for line in child.stdout or ():
                if line.startswith("{"):
                    answer, ended = line, time.monotonic()
            code = child.wait()
        finally:
            late.cancel()
            child.kill()
        if code == 0 and answer:
            return phases(json.loads(answer), began, ended)
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:] or ["without a word"]
    if code == 2:
        raise ConfigError(said[0])
    if expired.is_set():
        raise QuireError(f"the engine gave no token within {timeout:g} seconds")
    raise QuireError(f"the engine's process ended with status {code}: {said[0]}")


def phases(moments: Mapping[str, Any], began: float, ended: float) -> dict[str, Any]:
    """Returns the phases of a start.

    Args:
        moments: times that the process reported.
        began: when the process was started.
        ended: when the first token had arrived in this process.
    """
    parts: Mapping[str, float] = moments["seconds"]
    weights, capture = parts.get("weights", 0.0), parts.get("graphs", 0.0)
    return {
        "first_token_s": ended - began,
        "python_s": moments["started"] - began,
        "import_s": moments["imported"] - moments["started"],
        "weights_s": weights,
        "capture_s": capture,
        "rest_s": moments["built"] - moments["imported"] - weights - capture,
        "generate_s": ended - moments["built"],
        "device": moments["device"],
    }
