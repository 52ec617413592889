"""Digests that tell whether two servers have the same checkpoint."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from quire.config import EngineConfig
from quire.system import open_regular, stored_weights

_SAMPLE_BYTES = 1 << 16


def checkpoint_digest(config: EngineConfig) -> str:
    """Returns 32 hex digits for a model's files, whatever its format on the device. The result of
    the first call is kept because the files of a running model do not change."""
    return _kept_digest(Path(config.model_path), *source_of(config))


def source_of(config: EngineConfig) -> tuple[str, int | None]:
    """Returns the facts about a model's weights that its files do not tell."""
    args = config.args
    return args.load_format, args.seed if args.load_format == "dummy" else None


@functools.cache
def _kept_digest(folder: Path, *facts: object) -> str:
    return digest_of(folder, *facts)


def digest_of(folder: Path, *facts: object) -> str:
    """Returns 32 hex digits for a model's files and `facts`. Weight files count by name, size and
    first bytes, which name all tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for fact in facts:
        digest.update(repr(fact).encode() + b"\0")
    for file in (folder / "config.json", *stored_weights(folder)):
        if file.is_file():
            with open_regular(file) as opened:
                digest.update(repr((file.name, file.stat().st_size)).encode())
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
