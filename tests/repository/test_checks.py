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
    core = tool("core")
    assert core.code_lines(file) == 5
    table = core.markdown(
        {"llm.py": 5, "quantization/a.py": 2, "quantization/b.py": 1, "version.py": 0}
    )
    rows = [
        "| files at the top | 2 | 5 |",
        "| `quantization/` | 2 | 3 |",
        "| **all** | **4** | **8** |",
    ]
    assert table.splitlines()[2:] == rows
    page = "a\n<!-- core: begin -->\nbefore\n<!-- core: end -->\nb\n"
    assert "before" not in core.with_table(page, table)
    with pytest.raises(SystemExit, match="markers"):
        core.with_table("a", table)


CORE_FILE = """
import json
from typing import TYPE_CHECKING

from quire import plan, server
from quire.plan import StepPlan

if TYPE_CHECKING:
    from quire.server import App

def late():
    import quire.plan

def device():
    return importlib.import_module("quire.kernels")
"""


def test_the_core_imports_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tool("core")
    for name in ("llm", "plan", "server"):
        (tmp_path / f"{name}.py").write_text(CORE_FILE if name == "llm" else "")
    monkeypatch.setattr(core, "CORE", ("llm.py", "plan.py"))
    files = core.core_files(tmp_path)
    assert files == [tmp_path / name for name in ("llm.py", "plan.py", "__init__.py")]
    found = list(core.breaches(files[0], set(files), tmp_path))
    assert [each.split(": ")[1].split(" is ")[0] for each in found] == [
        "quire.server",
        "quire.plan",
        "?",
    ]
    monkeypatch.setattr(core, "PLUGIN_POINTS", {"llm.py:device": "the device"})
    monkeypatch.setattr(core, "LATE", {"llm.py:late": "a circle"})
    assert len(list(core.breaches(files[0], set(files), tmp_path))) == 1
    assert core.stale(files[:1], tmp_path) == []
    monkeypatch.setattr(core, "LATE", {"llm.py:early": "a circle"})
    assert core.stale(files[:1], tmp_path) == ["llm.py:early"]
    monkeypatch.setattr(core, "CORE", ("llm.py", "gone.py"))
    with pytest.raises(SystemExit, match=r"gone\.py"):
        core.core_files(tmp_path)


def test_names_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = tool("check_feature_names")
    monkeypatch.setattr(checks, "SOURCE", tmp_path)
    monkeypatch.setattr(checks, "CHECKED", ("scheduler",))
    monkeypatch.setattr(checks, "ALLOWED", {"scheduler/order": {"tenant": "queues are fair"}})
    (tmp_path / "scheduler").mkdir()
    order = tmp_path / "scheduler" / "order.py"
    order.write_text('"""An adapter, explained."""\ntenant = 1\nrevision = "speculation"\n')
    found = [
        line
        for file in checks.checked_files()
        for line in checks.findings(file, checks.banned(file))
    ]
    assert found == ["scheduler/order.py:3: names a feature: 'speculation'"]
    assert list(checks.unused()) == []
    order.write_text("revision = 1\n")
    assert list(checks.unused()) == [("scheduler/order", "tenant")]
