"""The actors that hold the devices of an engine's ranks in a Ray cluster, and run workers."""

from __future__ import annotations

import os

import ray

from quire.engine.processes import thread_variables


class RankActor:
    """Holds devices in a Ray cluster as long as it lives.

    On the engine's machine one actor holds the devices of all ranks. On other machines each rank
    has an actor, whose process becomes the rank's worker.
    """

    def gpus(self) -> list[str]:
        """Returns the ids of the actor's GPUs, in the form of CUDA_VISIBLE_DEVICES."""
        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def run(self, address: str, port: int, node_rank: int, index: int, visible: str | None) -> None:
        """Connects to the engine, and runs a worker for it. The process ends with the worker.

        Args:
            visible: the GPUs of all ranks of this machine; None on a CPU. A rank must see the GPUs
                of its neighbours to reach their memory, but Ray would show it only its own.
        """
        os.environ.update(thread_variables(os.environ))
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        # Imported here because they import torch, which reads these variables.
        from quire.engine.ranks.nodes import connect
        from quire.engine.ranks.worker_process import main

        pipe = connect(address, port, node_rank, index)
        main(pipe.fileno())
