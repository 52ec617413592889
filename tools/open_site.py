"""Opens the site of `make lessons` in a browser, or prints its place: python tools/open_site.py"""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "build" / "site" / "docs" / "start.html"


def has_screen() -> bool:
    """Tells whether a browser can open a window here. Without one it might take the terminal."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def main() -> None:
    if has_screen() and webbrowser.open(SITE.as_uri()):
        print(f"Opened {SITE}")
    else:
        print(f"The site begins at {SITE}")
        print("Elsewhere: python3 -m http.server -d build/site, then http://localhost:8000")
    print("The first lesson: .venv/bin/python -m lessons 1")


if __name__ == "__main__":
    main()
