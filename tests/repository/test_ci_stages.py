"""The stages of the workflow are together what .ci/run does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["environment", "ops", "one-rank", "several-ranks"]


def commands(target: str) -> list[str]:
    """Returns the pytest arguments, and other commands, that make would run for a target."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def pytest_arguments(target: str) -> list[str]:
    (line,) = [line for line in commands(target) if " -m pytest " in line]
    return line.partition("--dist worksteal")[2].split()


def test_stages_follow_each_other() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert list(jobs) == STAGES
    assert [jobs[name].get("needs") for name in STAGES] == [None, *STAGES[:-1]]
    ran = [step["run"] for name in STAGES for step in jobs[name]["steps"] if "run" in step]
    assert [run for run in ran if run.startswith("make")] == [
        "make lint", "make test-ops", "make kernels TRITON=3.7.1", "make test-one-rank",
        "make test-ranks",
    ]  # fmt: skip


def test_parts_are_the_whole() -> None:
    ranks = pytest_arguments("test-ranks")
    assert ranks
    assert all((ROOT / path).is_file() for path in ranks)
    assert pytest_arguments("test-ops") == ["tests/ops"]
    ignored = [f"--ignore={path}" for path in ("tests/ops", *ranks)]
    assert pytest_arguments("test-one-rank") == ["tests", *ignored]
    assert pytest_arguments("test") == []  # all of tests/


def test_the_whole_is_lint_and_tests() -> None:
    run = (ROOT / ".ci/run").read_text()
    assert "export QUIRE_TESTS_NEED_BROWSER=1\n" in run
    assert run.endswith("export QUIRE_TESTS_REAL=1\nexec make real test\n")
    assert "install --yes --no-install-recommends chromium" in run
    assert re.search(r"^test: lint$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_templates_are_valid() -> None:
    for file in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(file.read_text())
