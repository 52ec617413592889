"""Files that a user names: only regular files are read, and only up to a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.system import open_regular, read_bounded


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_bounded(file, 5) == read_bounded(str(link), 5) == b"12345"
    with open_regular(file) as opened:
        assert opened.read() == b"12345"


def test_a_larger_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"123456")
    with pytest.raises(OSError, match="larger than the 5 bytes"):
        read_bounded(file, 5)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link to a device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_bounded(path)
