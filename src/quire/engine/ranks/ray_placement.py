"""Ray's placement of ranks: it finds machines with free devices, holds them, and starts workers.

No plan and no tensor passes through Ray. A worker's actor connects to the engine in the same way as
a worker that was started by hand (`nodes.py`). The engine notices its end by the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.config import EngineConfig
from quire.engine.ranks.ranks import ranks_of_node
from quire.engine.ranks.ray_actor import RankActor
from quire.errors import ConfigError, EngineDeadError
from quire.system import visible_devices

logger = logging.getLogger("quire.engine")

_JOIN_SECONDS = 60.0
"""Seconds within which the cluster must be large enough. Its machines may still be starting."""
_FREE_SECONDS = 120.0
"""Seconds within which the devices must be free. An engine that has just died may still hold
them."""
_ACTOR_SECONDS = 120.0
"""Seconds within which an actor's process must have started."""
_GLANCE = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of a Ray cluster, and its number of devices of one kind."""

    id: str
    address: str
    devices: int


class RayPlacement:
    """Holds the devices of an engine's ranks in this machine's Ray cluster, and runs the workers of
    the other machines.

    The placement group has a bundle for each machine, with the devices of all its ranks, so these
    stay together. The first bundle is this machine's, where the engine's process is rank 0.

    Attributes:
        config: the engine's settings, with this machine's address in Ray.
        devices: devices of this machine's ranks.

    Raises:
        ConfigError: there is no cluster, or it is too small.
        EngineDeadError: devices do not become free, or an actor does not start.
    """

    def __init__(self, config: EngineConfig, world: int) -> None:
        args = config.args
        kind, each = "CPU" if config.device == "cpu" else "GPU", ranks_of_node(config, world)
        self._owner = not ray.is_initialized()
        self._group: Any = None
        if self._owner:
            _connect()
        try:
            own = ray.get_runtime_context().get_node_id()
            here = _wait_for_machines(kind, each, args.nnodes, own)
            args = replace(args, master_addr=here.address)
            self.config = replace(config, args=args)
            self._group = _reserve(kind, each, args.nnodes, own)
            # The handles are kept because Ray ends an actor without a handle.
            self._actors = [self._actor(kind, each, 0)]
            for rank in range(each, world):
                self._actors.append(self._actor(kind, 1, rank // each))
            gpus = _get([actor.gpus.remote() for actor in self._actors])
            own_gpus, others = gpus[0], gpus[1:]
            self.devices = [config.device] * each if kind == "CPU" else own_devices(own_gpus)
            self._runs = []
            for place, actor in enumerate(self._actors[1:]):
                node, index = place // each + 1, place % each
                beside = others[place - index : place - index + each]
                visible = ",".join(id for ids in beside for id in ids) if kind == "GPU" else None
                self._runs.append(
                    actor.run.remote(here.address, args.master_port, node, index, visible)
                )
        except BaseException:
            self.close()
            raise

    def _actor(self, kind: str, devices: int, bundle: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        amounts = {"num_cpus": 0, "num_gpus": 0, f"num_{kind.lower()}s": devices}
        return ray.remote(RankActor).options(scheduling_strategy=place, **amounts).remote()

    def check(self) -> None:
        """Raises EngineDeadError if an actor has ended."""
        ended, _ = ray.wait(self._runs, timeout=0.0)
        if ended:
            _get(ended)
            raise EngineDeadError("a worker that Ray has placed ended before it had connected")

    def close(self) -> None:
        """Gives the devices back. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owner:
            self._owner = False
            ray.shutdown()


def _connect() -> None:
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        # Ray's workers import first from the folder in which this process calls `init`.
        with contextlib.chdir("/"):
            ray.init(address=address, configure_logging=False)
    except (ConnectionError, RayError, ValueError) as error:
        raise ConfigError(
            f"distributed_executor=ray: no Ray cluster can be reached ({error}); `ray start "
            "--head` starts one, `ray start --address` adds a machine, RAY_ADDRESS names another",
            "distributed_executor",
        ) from error


def _machines(kind: str) -> list[Machine]:
    return [
        Machine(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get(kind, 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


def missing_resources(
    machines: Sequence[Machine], own: str, kind: str, each: int, count: int
) -> str | None:
    """Returns the reason why machines do not suffice for an engine; None if they suffice.

    Args:
        machines: The machines of Ray's cluster.
        own: Id of the engine's machine.
        kind: Kind of device, as Ray names it.
        each: Number of these devices that each machine must have.
        count: Number of machines that the engine needs.
    """
    here = next((machine for machine in machines if machine.id == own), None)
    fit = sum(machine.devices >= each for machine in machines)
    if here is not None and here.devices >= each and fit >= count:
        return None
    found = ", ".join(
        f"{machine.address}{' (this one)' if machine.id == own else ''} with {machine.devices}"
        for machine in machines
    )
    return (
        f"the engine needs {count} machine{'s' * (count > 1)} with {each} {kind}"
        f"{'s' * (each > 1)} each, including this one; Ray's cluster has {found or 'no machine'}"
    )


def _wait_for_machines(kind: str, each: int, count: int, own: str) -> Machine:
    """Waits until the cluster suffices, and returns the engine's machine."""
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        machines = _machines(kind)
        missing = missing_resources(machines, own, kind, each, count)
        if missing is None:
            return next(machine for machine in machines if machine.id == own)
        if time.monotonic() > deadline:
            raise ConfigError(f"distributed_executor=ray: {missing}", "distributed_executor")
        logger.info("waiting for machines: %s", missing)
        time.sleep(_GLANCE)


def _reserve(kind: str, each: int, count: int, own: str) -> Any:
    """Returns a placement group of `count` machines. The first one is the engine's."""
    group = placement_group(
        [{kind: each}] * count,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": own}] + [{}] * (count - 1),
    )
    if not group.wait(_FREE_SECONDS):
        remove_placement_group(group)
        free = int(ray.available_resources().get(kind, 0))
        raise EngineDeadError(
            f"Ray has not found {count} x {each} free {kind}s within {_FREE_SECONDS:g} s: others "
            f"hold them; {free} are free in its cluster"
        )
    return group


def own_devices(ids: Sequence[str]) -> list[str]:
    """Returns this process's device names for GPUs with these ids in Ray.

    Raises:
        ConfigError: this process does not see one of the GPUs.
    """
    seen = visible_devices()
    unseen = [id for id in ids if seen is not None and id not in seen]
    if unseen:
        raise ConfigError(
            f"distributed_executor=ray: Ray gives this machine's ranks the GPUs {', '.join(ids)}, "
            f"but CUDA_VISIBLE_DEVICES={','.join(seen or ())} hides {', '.join(unseen)}",
            "distributed_executor",
        )
    return [f"cuda:{int(id) if seen is None else seen.index(id)}" for id in ids]


def _get(references: Sequence[Any]) -> list[Any]:
    try:
        return list(ray.get(list(references), timeout=_ACTOR_SECONDS))
    except RayError as error:
        raise EngineDeadError(f"an actor of Ray has failed: {error}") from error
