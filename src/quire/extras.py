"""Advice on the packages that not everyone needs."""

from __future__ import annotations

import importlib.util

from quire.errors import ConfigError

NIXL = ("nixl_cu12", "nixl_cu13")
"""Modules of NIXL, by the CUDA that they are for. On a CPU either will do."""


def installing(extra: str) -> str:
    """Returns how to install an extra. The name on PyPI is another project's."""
    return (
        f"install the extra '{extra}': pip install '.[{extra}]' in a checkout of Quire, or the "
        f"wheel of a release with [{extra}] behind its name"
    )


def require_nixl() -> str:
    """Returns the name of NIXL's module.

    Raises:
        ConfigError: it is not installed.
    """
    for name in NIXL:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ConfigError(
        f"transport=nixl needs the package nixl-cu12, or nixl-cu13: {installing('nixl')}",
        "transport",
    )
