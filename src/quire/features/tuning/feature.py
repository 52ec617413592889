"""The engine's part: it starts the measuring process, and counts steps for it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature
from quire.features.tuning.new_entries import missing_shapes
from quire.features.tuning.step_counts import StepCounts
from quire.features.tuning.table_order import TableOrder, shapes_as_json
from quire.ops.triton.products.plan import Shape
from quire.ops.triton.products.table import chosen
from quire.scheduler import Feature
from quire.system import python_command

logger = logging.getLogger("quire.tables")

_WORKERS = 4
"""Most threads that compile, because other processes may need the cores."""
COMMAND = python_command("quire.features.tuning.table_process")


class TableTuning(LoopFeature):
    """Starts a process that measures the plans that the tables lack. command: the process's
    command."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = COMMAND) -> None:
        self._config = config
        self._command = command
        self._counts: StepCounts | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        device = torch.device(self._config.device)
        card = torch.cuda.get_device_name(device)
        missing = missing_shapes(chosen.by_rules.values(), card)
        dtype = getattr(torch, self._config.dtype)
        missing = [shape for shape in missing if shape.dtype == dtype]
        if not missing:
            return None
        total = torch.cuda.get_device_properties(device).total_memory
        left = int(total * (1.0 - self._config.args.gpu_memory_utilization))
        self._launch(device.index or 0, card, left, missing)
        every = len(chosen.measured) + len(chosen.by_rules)
        _log(
            f"{len(missing)} of {every} products run by rules of thumb on {card}; their plans are "
            "measured while the engine is idle, for its next start"
        )
        return Feature()

    def _launch(self, device: int, card: str, memory: int, shapes: Sequence[Shape]) -> None:
        workers = max(1, min(_WORKERS, (os.cpu_count() or 1) // 4))
        order = TableOrder(device, card, memory, workers, shapes_as_json(shapes))
        descriptor, self._counts = StepCounts.make()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(descriptor)
        threading.Thread(
            target=self._watch, args=(self._process, order), daemon=True, name="tables-watch"
        ).start()

    def _watch(self, process: subprocess.Popen[bytes], order: TableOrder) -> None:
        """Sends the order, and logs the process's output until it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # The process may be gone already.
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
        said = False
        for line in process.stdout:
            said = True
            _log(line.decode(errors="replace").rstrip())
        status = process.wait()
        if not said and not self._closing:
            logger.warning("the process that measures plans ended (status %d)", status)

    def before_submit(self) -> None:
        if self._counts is not None:
            self._counts.launch()

    def after_update(self, step_id: int) -> None:
        if self._counts is not None:
            self._counts.read()

    def close(self, drain: Callable[[], None] | None) -> None:
        self._closing = True
        if self._process is not None:
            self._process.kill()


def _log(text: str) -> None:
    """Logs a line. A process without a configured log gets it on standard error."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(text)
