"""Threads of the engine's process, chosen before PyTorch is imported there."""

from __future__ import annotations

from collections.abc import Mapping


def thread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to start the engine's process with.

    Between two parallel regions OpenMP's threads spin by default. Where other processes share the
    cores, the API process among them, spinning threads take the time that those need to go on.
    Passive threads sleep instead: `bench/threads.py` measures it, beside one thread.

    Args:
        environment: of the parent; what it sets of OpenMP stays.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
