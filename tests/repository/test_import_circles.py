"""The check for import circles finds them however the imports are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.check_import_circles import circles, imports, modules, shortest


def graph(folder: Path, files: dict[str, str]) -> dict[str, set[str]]:
    for name, text in files.items():
        path = folder / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = modules(folder, "pkg")
    return {name: imports(name, path, known) for name, path in known.items()}


@pytest.mark.parametrize(
    "back",
    [
        "import pkg.a",
        "from pkg import a",
        "from pkg.a import thing",
        "from . import a",
        "from .a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import thing",
        "try:\n    import pkg.a\nexcept ImportError:\n    pass",
    ],
)
def test_a_circle_of_two(tmp_path: Path, back: str) -> None:
    found = graph(tmp_path, {"__init__.py": "", "a.py": "from pkg import b", "b.py": back})
    assert circles(found) == [["pkg.a", "pkg.b"]]
    assert shortest(found, ["pkg.a", "pkg.b"]) == ["pkg.a", "pkg.b", "pkg.a"]


def test_imports_within_functions_count(tmp_path: Path) -> None:
    late = "def later():\n    import pkg.a\n"
    found = graph(tmp_path, {"a.py": "import pkg.b", "b.py": late, "__init__.py": ""})
    assert circles(found) == [["pkg.a", "pkg.b"]]


def test_a_package_that_its_module_imports(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "sub/__init__.py": "from pkg.sub.inner import thing",
        "sub/inner.py": "from pkg.sub import other",
    }
    assert circles(graph(tmp_path, files)) == [["pkg.sub", "pkg.sub.inner"]]


def test_the_shortest_circle_of_a_group_is_shown(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a.py": "import pkg.b",
        "b.py": "import pkg.c",
        "c.py": "import pkg.a\nimport pkg.d",
        "d.py": "import pkg.c",
        "e.py": "import pkg.a",
    }
    found = graph(tmp_path, files)
    (group,) = circles(found)
    assert group == ["pkg.a", "pkg.b", "pkg.c", "pkg.d"]
    assert shortest(found, group) == ["pkg.c", "pkg.d", "pkg.c"]
