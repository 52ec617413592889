"""The measuring process of an engine: `python -m quire.features.tuning.table_process FD`.

FD is the memory of the engine's step counts. The order is a line on standard input. The engine
keeps the input open, and the process ends when it is closed. Each line of the process's output goes
to the engine's log.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

import msgspec
import torch

from quire.features.tuning.new_entries import make_entries, missing_shapes
from quire.features.tuning.step_counts import IdleTurn, StepCounts
from quire.features.tuning.table_order import TableOrder
from quire.ops.triton.products.measure import Measured, preferred
from quire.ops.triton.products.plan import GemmPlan, Shape
from quire.ops.triton.products.plans import sole_writer
from quire.ops.triton.products.table import PLANS

_CONTEXT = 600 << 20
"""Bytes of a GPU that a process uses before its first allocation."""
_NICE = 19


def measure(order: TableOrder, counts: StepCounts) -> str:
    """Carries out an order, and returns a summary in words.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    path = PLANS.path(order.card)
    with sole_writer(path) as alone:
        if not alone:
            return f"another process measures plans for {path}; this engine leaves it to that"
        PLANS.forget()
        shapes = missing_shapes(order.shapes(), order.card)
        device = torch.device("cuda", order.device)
        room = _room(device, order.memory)
        gains = 0

        def report(shape: Shape, found: list[Measured[GemmPlan]]) -> None:
            nonlocal gains
            gains += preferred(found) is not found[0]

        began = time.monotonic()
        kept, left_out = make_entries(
            shapes, order.card, device, room=room, workers=order.workers, report=report,
            turn=IdleTurn(counts, torch.cuda.synchronize),
        )  # fmt: skip
    if not kept and left_out:
        return (
            f"no plans measured: {left_out} products need more than the {max(0, room) >> 20} MiB "
            "that gpu_memory_utilization leaves"
        )
    omitted = f"; {left_out} products had no room" if left_out else ""
    return (
        f"{kept} plans measured in {time.monotonic() - began:.0f} s, {gains} of them faster than "
        f"the rules of thumb; the next start takes them from {path}{omitted}"
    )


def _room(device: torch.device, memory: int) -> int:
    """Returns the bytes of the device that measurements may use, at most `memory` with the
    process's own. It also limits PyTorch's allocator to them."""
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    room = min(free, memory - _CONTEXT)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(room, 1) / total), device)
    return room


def _end_with_input() -> None:
    """Ends this process when the engine closes its end of the input."""

    def watch() -> None:
        poller = select.poll()
        poller.register(sys.stdin.fileno(), 0)  # POLLHUP is always reported.
        poller.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="engine-watch").start()


def main(descriptor: int) -> None:
    # Ctrl-C reaches the whole process group; the engine decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=TableOrder)
    _end_with_input()
    status = 0
    try:
        said = measure(order, StepCounts(descriptor))
    except Exception as error:
        said, status = f"plans cannot be measured: {type(error).__name__}: {error}", 1
    sys.stdout.write(" ".join(said.split()) + "\n")
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
