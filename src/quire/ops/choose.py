"""Which implementation of an op runs: decided by device and policy, once, then remembered.

A backend is a module that holds functions under the ops' names. It may hold only some of them, and
the reference backend, which runs anywhere, stands in for the rest. Adding one is a line in
`BACKENDS`; no caller changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Backend:
    """`devices` are the device types it serves, None for all; the module is imported on first use,
    so that a backend's dependencies are needed only where it runs."""

    name: str
    module: str
    devices: frozenset[str] | None = None

    def serves(self, device_type: str) -> bool:
        return self.devices is None or device_type in self.devices


BACKENDS = (
    Backend("triton", "quire.ops.triton", frozenset({"cuda"})),
    Backend("reference", "quire.ops.reference"),
)
"""In order of preference; the last serves every op on every device."""


# Compared by identity: hashing two fields at every op call was a fifth of the dispatch's cost.
@dataclass(frozen=True, eq=False)
class Policy:
    """backend: the name of the one to prefer, or auto. deterministic: results may depend on the
    request alone, not on what else is in the batch. disabled: optimizations not to use, see
    `config.OPTIMIZATIONS`."""

    backend: str = "auto"
    deterministic: bool = False
    disabled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [backend.name for backend in BACKENDS]
        if self.backend != "auto" and self.backend not in names:
            raise ConfigError(
                f"unknown kernel backend {self.backend!r}; known are: auto, {', '.join(names)}"
            )


_DEFAULT = Policy()
_policy: ContextVar[Policy] = ContextVar("quire_ops_policy", default=_DEFAULT)


@contextlib.contextmanager
def use_policy(policy: Policy) -> Iterator[None]:
    """Ops called within the block, by this thread, choose by `policy`."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def current_policy() -> Policy:
    return _policy.get()


def choose(op: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes `op` on `device` under the current policy."""
    return _implementation(op, device.type, _policy.get())


@functools.cache
def _implementation(op: str, device_type: str, policy: Policy) -> Callable[..., Any]:
    order = sorted(BACKENDS, key=lambda backend: backend.name != policy.backend)
    for backend in order:
        if backend.serves(device_type):
            function = getattr(importlib.import_module(backend.module), op, None)
            if function is not None:
                return function  # type: ignore[no-any-return]
    raise ConfigError(f"no kernel backend has the op {op!r} for the device {device_type!r}")
