"""GGUF files whose counts promise more than the file holds."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from quire.errors import ModelError
from quire.models import resolve_model_path
from quire.models.gguf import file as gguf_file

pytest.importorskip("gguf")

_MANY = 1 << 50
_UINT8, _STRING, _ARRAY = 0, 8, 9


def _head(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def _array(item: int, length: int) -> bytes:
    """Returns a file with one setting: the beginning of an array."""
    return _head(0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", _ARRAY, item, length)


_FILES = {
    "settings": _head(0, _MANY),
    "tensors": _head(_MANY, 0),
    "array of bytes": _array(_UINT8, _MANY),
    "array of strings": _array(_STRING, _MANY),
    "nested arrays": _array(_ARRAY, 1) + struct.pack("<IQ", _ARRAY, 1) * 20_000,
    "arrays of arrays": _array(_ARRAY, _MANY) + struct.pack("<IQ", _ARRAY, _MANY),
    "a string's length": _head(0, 1) + struct.pack("<Q", _MANY),
    "dimensions": _head(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 31),
    "a dimension": _head(1, 0)
    + struct.pack("<Q", 1)
    + b"t"
    + struct.pack("<IQQQIQ", 3, 1 << 63, 1 << 63, 3, 0, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("name", _FILES)
def test_counts_are_not_believed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_FILES[name])
    with pytest.raises(ModelError, match=r"cannot read hostile\.gguf: ") as told:
        resolve_model_path(str(path))
    assert "\n" not in str(told.value)


def test_a_header_of_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_MOST_READS", 1000)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_array(_UINT8, 2000) + bytes(2000))
    with pytest.raises(ModelError, match="more than 1000 values"):
        resolve_model_path(str(path))


def test_a_pipe_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="not a regular file"):
        resolve_model_path(str(path))
