"""The actors that hold the devices of an engine's ranks in a Ray cluster, and run workers."""

from __future__ import annotations

import os

import ray

from quire.engine.processes import thread_variables


class RankActor:
    """Holds devices as long as it lives, those of all ranks of the engine's machine or of one rank
    elsewhere, whose worker its process becomes."""

    def gpus(self) -> list[str]:
        """Returns the ids of the GPUs that Ray has given it, as CUDA_VISIBLE_DEVICES has them."""
        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def run(self, address: str, port: int, node_rank: int, index: int, visible: str | None) -> None:
        """Connects to the engine, and runs the worker that it makes; the process ends with it.

        visible: the GPUs of all ranks of this machine, None without. A rank sees its neighbours'
            to reach their memory, where Ray would show it one alone.
        """
        os.environ.update(thread_variables(os.environ))
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        # Imported here because they import torch, which reads these variables.
        from quire.engine.ranks.nodes import connect
        from quire.engine.ranks.worker_process import main

        pipe = connect(address, port, node_rank, index)
        main(pipe.fileno())
