"""How Quire starts Python processes of its own."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of Quire in a process of its own.

    With `-P` the process never imports from the current folder. That folder may be a downloaded
    model, and any of its files could have a standard module's name.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
