"""Ops: typed functions with one signature and several implementations.

The plain PyTorch function (the twin) defines an op's signature and meaning, and runs on every
device. A backend is a module with functions of the same name for some of the ops. A call runs the
implementation that the first argument's device and the policy select."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from quire.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"
"""The name of the backend that runs the twins."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Kernels for some devices.

    Attributes:
        name: its name in `--kernels`.
        devices: the device types that it serves.
        module: holds functions under the names of ops. It is imported on first use, so that only
            processes that run a backend need its dependencies.
        deterministic: whether it serves only policies that ask for determinism.
    """

    name: str
    module: str
    devices: frozenset[str]
    deterministic: bool = False


BACKENDS = (
    Backend("triton", "quire.ops.triton", frozenset({"cuda"})),
    Backend("fixed", "quire.ops.fixed", frozenset({"cpu"}), deterministic=True),
)
"""Backends in order of preference. The twins come last, and serve every op on every device."""


# Policies are compared by identity, because hashing their fields would take a fifth of the time of
# each op call's dispatch.
@dataclass(frozen=True, eq=False)
class Policy:
    """Decides which code computes ops.

    Attributes:
        backend: name of the preferred backend, or "auto".
        deterministic: whether results must not depend on the other requests of a batch.
        disabled: optimizations that are switched off, see `config.OPTIMIZATIONS`.
    """

    backend: str = "auto"
    deterministic: bool = False
    disabled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = ["auto", *(backend.name for backend in BACKENDS), REFERENCE]
        if self.backend not in names:
            raise ConfigError(
                f"unknown kernel backend {self.backend!r}; expected one of: {', '.join(names)}"
            )


_DEFAULT = Policy()
_policy: ContextVar[Policy] = ContextVar("quire_ops_policy", default=_DEFAULT)


@contextlib.contextmanager
def use_policy(policy: Policy) -> Iterator[None]:
    """Applies `policy` to the ops that this thread calls within the block."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def current_policy() -> Policy:
    """Returns the policy of the innermost `use_policy`."""
    return _policy.get()


def op(twin: Callable[P, R]) -> Callable[P, R]:
    """Returns the op that `twin` defines: a function of the same name and signature.

    A call runs a backend's function of that name, or `twin` itself if no backend has one. The
    first argument is positional and has a `device`. `op` is a decorator of the twin, or another
    module calls `name = op(twin)`. Twins call other twins directly."""

    @functools.wraps(twin)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device_type = cast(Any, args[0]).device.type
        run = implementation(twin, device_type, _policy.get())
        return run(*args, **kwargs)  # type: ignore[no-any-return]

    return call


@functools.cache
def implementation(
    twin: Callable[..., Any], device_type: str, policy: Policy
) -> Callable[..., Any]:
    """Returns the function that computes the op of `twin` on a type of device under a policy."""
    if policy.backend == REFERENCE:
        return twin
    for backend in sorted(BACKENDS, key=lambda backend: backend.name != policy.backend):
        if device_type in backend.devices and policy.deterministic >= backend.deterministic:
            function = getattr(importlib.import_module(backend.module), twin.__name__, None)
            if function is not None:
                return cast(Callable[..., Any], function)
    return twin
