"""The key of measured plans, and the tables that ship with the engine. No kernel runs."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from quire.ops.triton.products import plans
from quire.ops.triton.products.plans import TIMED_FOLDERS, hash_sources, slug, sources_hash
from quire.ops.triton.products.table import PLANS

PACKAGE = Path(plans.__file__).parent.parent
TIMED = sorted(path for folder in TIMED_FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
SHARED = sorted(PACKAGE.glob("*.py"))
SHIPPED = sorted((PACKAGE / "products" / "gemm_tables").glob("*.json"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copies the package, so that a test can change a source."""
    skip = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PACKAGE, tmp_path / "triton", ignore=skip))


def test_any_kernel_of_products_and_experts_changes_the_key(package: Path) -> None:
    before = hash_sources(package)
    assert before == sources_hash()
    assert {path.parent.name for path in TIMED} == {"products", "experts"}
    keys = {before}
    for path in (*TIMED, *SHARED):
        copy = package / path.relative_to(PACKAGE)
        source = copy.read_bytes()
        copy.write_bytes(source + b"\n")
        keys.add(hash_sources(package))
        copy.write_bytes(source)
    assert len(keys) == 1 + len(TIMED) + len(SHARED)
    assert hash_sources(package) == before


def test_a_kernel_in_a_new_subfolder_changes_the_key(package: Path) -> None:
    before = hash_sources(package)
    folder = package / "products" / "more" / "kernels"
    folder.mkdir(parents=True)
    (folder / "product.py").write_text("")
    assert hash_sources(package) != before


def test_kernels_that_no_plan_times_keep_the_key(package: Path) -> None:
    before = hash_sources(package)
    with (package / "attention" / "kernels.py").open("a") as file:
        file.write("\n")
    assert hash_sources(package) == before


@pytest.mark.parametrize("path", TIMED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_timed_kernels_import_only_kernels_that_the_key_covers(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.ops.triton."):
            part = (node.module or "").split(".")[3]
            assert part in TIMED_FOLDERS or (PACKAGE / f"{part}.py").exists(), node.module


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_load(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    text = path.read_text()
    card, entries = json.loads(text)["card"], PLANS.loads(text)
    PLANS.forget()
    assert slug(card) == path.stem
    assert entries
    assert PLANS.entries(card) == entries
    PLANS.forget()


def test_a_table_ships() -> None:
    assert SHIPPED
