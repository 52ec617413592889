"""Advice on the packages that not everyone needs."""

from __future__ import annotations


def installing(extra: str) -> str:
    """Returns how to install an extra. The name on PyPI is another project's."""
    return (
        f"install the extra '{extra}': pip install '.[{extra}]' in a checkout of Quire, or the "
        f"wheel of a release with [{extra}] behind its name"
    )
