"""The current `openai` client for Node from npm, against a real server process."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import MODEL, Server

SCRIPT = Path(__file__).with_name("node_client.mjs")


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the client installed; skips the test if it cannot be installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=0", "openai"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the client: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def said(node_folder: Path, server: Server) -> dict[str, Any]:
    script = shutil.copy(SCRIPT, node_folder)
    done = subprocess.run(
        ["node", script, f"{server.url}/v1", MODEL],
        cwd=node_folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def test_chat(said: dict[str, Any]) -> None:
    assert said["chat"]
    assert said["chatStream"] == said["chat"] == said["chatHelper"]
    assert said["chatUsage"] == 8


def test_responses(said: dict[str, Any]) -> None:
    assert said["response"] == said["chat"]
    assert said["responseStream"] == said["response"] == said["retrieved"]
    assert said["responseHelper"] == said["response"]
    assert said["events"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_stored_responses(said: dict[str, Any]) -> None:
    assert said["items"] == ["user", "assistant", "user"]
    assert said["resumed"] == said["response"]
    assert said["error"] == [404, "response_id", True]
