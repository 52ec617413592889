"""The checks of `make lint`: docstrings, class names, lines of code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_words_of_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""What it is."""\n'
        "class A:\n"
        '    """Ofte."""\n'
        "    x = 1\n"
        '    """`its` value."""\n'
        "    def f(self):\n"
        '        """Returns what is there."""\n'
        '        return "Which"\n'
    )
    found = list(tool("check_docstrings").findings(file))
    assert found == [(1, "What it is."), (5, "`its` value.")]


def test_folders_of_docstrings() -> None:
    folder_of = tool("check_docstrings").folder_of
    files = ["src/quire/llm.py", "src/quire/ops/triton/norm.py", "tests/server/parsers/a.py"]
    assert [folder_of(Path(file)) for file in files] == [
        "src/quire",
        "src/quire/ops",
        "tests/server",
    ]


def test_classes_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = tool("check_class_names")
    monkeypatch.setattr(checks, "SOURCE", tmp_path)
    (tmp_path / "a.py").write_text("class A:\n    class B: ...\nclass C: ...\n")
    (tmp_path / "b.py").write_text("class B: ...\n")
    assert checks.defined() == {"A": ["a.py"], "B": ["b.py"], "C": ["a.py"]}
    assert checks.main() == 0
    (tmp_path / "b.py").write_text("class C: ...\n")
    assert checks.main() == 1


def test_lines_of_code(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""One\ntwo."""\n\n# no\nx = (\n    1,  # yes\n\n)\ny = """a\nb"""\n"""y."""\n'
    )
    assert tool("core_lines").code_lines(file) == 5
    table = tool("core_lines").markdown({"quire.llm": 5, "quire.engine": 0}, 5)
    assert table.splitlines()[2:] == ["| `llm.py` | 5 |", "| **1 files** | **5** |"]
    page = "a\n<!-- core: begin -->\nold\n<!-- core: end -->\nb\n"
    assert "old" not in tool("core_lines").with_table(page, table)
    with pytest.raises(SystemExit, match="markers"):
        tool("core_lines").with_table("a", table)
