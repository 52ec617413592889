"""Findings of `quire doctor`, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from quire.cli import doctor
from quire.cli.main import app


def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Returns the exit status, and the findings by subject."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--port", "0", *arguments])
    found = json.loads(result.stdout)
    return result.exit_code, {finding["subject"]: finding for finding in found}


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 8_000_000_000)
    status, found = run()
    assert status == 0
    assert {finding["status"] for finding in found.values()} <= {"ok", "warning"}
    assert {"Python", "PyTorch", "Triton", "memory", "127.0.0.1:0"} <= set(found)


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 1_000_000)
    result = CliRunner().invoke(app, ["doctor", "--port", "0"])
    assert result.exit_code == 1
    assert "→ end other programs" in result.output
    assert "1 problem\n" in result.output


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, found = run("--port", str(port))
    finding = found[f"127.0.0.1:{port}"]
    assert status == 1
    assert finding["status"] == "problem"
    assert "--port" in finding["advice"]


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    status, found = run(str(tmp_path))
    assert status == 1
    assert "has no config.json" in found[str(tmp_path)]["found"]


def test_a_folder_that_is_not_there() -> None:
    status, found = run("/no/such")
    assert status == 1
    assert found["/no/such"]["found"] == "no such model folder: /no/such"
    assert "or a hub id" in found["/no/such"]["advice"]


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    finding = doctor.disk("models", tmp_path / "not" / "there")
    assert finding.status == "problem"
    assert str(tmp_path) in finding.found


def test_a_folder_of_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.disk("models", tmp_path).status == "problem"


@pytest.mark.parametrize(("built", "advice"), [(None, "pip install"), ("13.0", "driver")])
def test_a_gpu_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, built: str | None, advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    (finding,) = doctor.gpus()
    assert finding.status == "problem"
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("capability", "free", "status"),
    [((9, 0), 70, "ok"), ((9, 0), 10, "warning"), ((6, 1), 70, "problem")],
)
def test_cards(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], free: int, status: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free * 2**30, 80 * 2**30))
    card = SimpleNamespace(name="a card", major=capability[0], minor=capability[1])
    assert doctor.gpu(0, card).status == status


def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.triton().status == "problem"


@pytest.mark.parametrize(
    ("version", "capability", "status"),
    [
        ("3.6.0", (9, 0), "ok"),
        ("3.9.1", (9, 0), "ok"),
        ("3.10.0", (9, 0), "warning"),
        ("3.5.1", (9, 0), "warning"),
        ("3.10.0", (8, 0), "ok"),
    ],
)
def test_a_triton_without_hoppers_kernels(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int], status: str
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    finding = doctor.triton()
    assert finding.status == status
    if status == "warning":
        assert version in finding.found
        assert "3.6 to 3.9" in finding.found
        assert "torch" in finding.advice


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    finding = doctor.torch_package()
    assert finding.status == "problem"
    assert "2.11" in finding.advice
