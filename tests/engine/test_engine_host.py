"""The private folder of an engine's socket."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from quire.engine.process import host
from quire.errors import ConfigError
from quire.server.args import ServerArgs
from quire.server.process.listen import bind


def test_a_long_temporary_folder_still_gives_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = host._private_folder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "engine"))
    assert not folder.is_relative_to(long)
    assert folder.stat().st_mode & 0o077 == 0  # nobody else may connect
    (folder / "engine").unlink()
    folder.rmdir()


def test_without_any_short_folder_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **named: Any) -> str:
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match="set TMPDIR to a short path"):
        host._private_folder()


def test_a_socket_path_that_is_too_long_is_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        bind(ServerArgs(uds="/tmp/" + "x" * 120))
