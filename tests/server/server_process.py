"""Real server processes on the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

READY = re.compile(r"^Serving (\S+) at (\S+)\. ", re.MULTILINE)
MODEL = "tiny"
WAIT = 120
"""Seconds that a state may take to come; the machine may be busy."""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    output: list[str]

    def client(self, **options: object) -> openai.OpenAI:
        options.setdefault("api_key", "none")
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=60, **options)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT) as response:
            text = response.read().decode()
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(value)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds} s for {what}\n{''.join(self.output)}")
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def start_server(
    *flags: str, variables: Mapping[str, str] | None = None, folder: Path | None = None
) -> Server:
    """Starts `quire serve` on a free port and waits until it says that it is ready.

    Args:
        variables: for its environment.
        folder: its current folder; None: this process's.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--served-model-name", MODEL, "--kv-cache-gb", "0.25", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=folder,
        start_new_session=True,
    )
    output: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            output.append(line)

    threading.Thread(target=read, daemon=True).start()
    server = Server(process, "", output)
    try:
        server.wait_for(
            lambda: READY.search("".join(output)) is not None or process.poll() is not None,
            "the server",
        )
    except BaseException:
        process.kill()
        raise
    match = READY.search("".join(output))
    if match is None:
        pytest.fail(f"the server did not start:\n{''.join(output)}")
    server.url = match[2]
    return server
