"""Runs a function on ranks connected by gloo, each in a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quire.parallel import ProcessGroup
from quire.parallel.torch_group import TorchGroup
from tests import fork_server


def on_ranks(work: Callable[..., Any], what: Any, folder: Path, world: int = 2) -> list[Any]:
    """Returns what `work(what, group)` gives on each rank. work: a module's function. folder: where
    the ranks find each other."""
    context = fork_server.context()
    out = context.Queue()
    rendezvous = f"file://{folder / 'rendezvous'}"
    processes = [
        context.Process(target=_run, args=(work, what, rank, world, rendezvous, out), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = dict(out.get(timeout=240) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return [found[rank] for rank in range(world)]


def _run(
    work: Callable[[Any, ProcessGroup], Any],
    what: Any, rank: int, world: int, rendezvous: str, out: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    out.put((rank, work(what, TorchGroup())))
    dist.barrier()
    dist.destroy_process_group()
