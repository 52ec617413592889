"""The adapters of an engine, by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

CONFIG = "adapter_config.json"
"""The file that makes a folder an adapter."""

_NAME = re.compile(r"[^\s/\\\x00-\x1f.][^\\\x00-\x1f]{0,255}")
_FOLDER = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,254}")


@dataclass(eq=False, slots=True)
class Version:
    """An adapter as it was when a name was given to it. Requests keep the version they began with.

    path: its folder. digest: of its contents; "" until it was read. hub_id: as which it was asked
    for; "" for a folder of this machine.
    """

    name: str
    path: str
    digest: str = ""
    hub_id: str = ""

    @property
    def key(self) -> int:
        """Stands for the contents in the keys of the prefix tree, never 0."""
        return int(self.digest[:15], 16) | 1 << 60


class Registry:
    """Names of adapters. folder: each of its folders that holds an adapter is one under its own
    name, read when a request first asks for it."""

    def __init__(self, folder: str | None) -> None:
        self._versions: dict[str, Version] = {}
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"lora_dir: there is no folder {folder!r}", "lora_dir")

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, name: str) -> bool:
        return name in self._versions

    def find(self, name: str) -> Version | None:
        """Returns the version that a name stands for now; None: the name is unknown."""
        known = self._versions.get(name)
        if known is None and (path := folder_of(self._folder, name)) is not None:
            known = self._versions[name] = Version(name, str(path))
        return known

    def set(self, version: Version) -> None:
        self._versions[version.name] = version

    def renew(self, version: Version) -> None:
        """Lets an adapter of the folder, whose files have changed, be read anew by requests to
        come."""
        if self._versions.get(version.name) is version:
            path = folder_of(self._folder, version.name)
            if path is not None and str(path) == version.path:
                del self._versions[version.name]

    def remove(self, name: str) -> bool:
        """Forgets a name. Returns whether it was known."""
        return self._versions.pop(name, None) is not None

    def names(self) -> list[str]:
        return sorted({*self._versions, *names_in(self._folder)})


def folder_of(folder: Path | None, name: str) -> Path | None:
    """Returns the folder of an adapter in a folder of adapters; None: it holds none of that
    name."""
    if folder is None or not _FOLDER.fullmatch(name):
        return None
    path = folder / name
    # Unlike Path's, this answers for any text: a name may be too long for the system.
    return path if os.path.isfile(path / CONFIG) else None


def names_in(folder: Path | None) -> list[str]:
    """Returns the names of the adapters in a folder of adapters."""
    if folder is None:
        return []
    try:
        found = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(name for name in found if folder_of(folder, name) is not None)


def valid_name(name: str) -> bool:
    """Whether an adapter may have this name: 1 to 256 characters, the first no dot, slash or
    space."""
    return _NAME.fullmatch(name) is not None


def parse_setting(setting: str) -> tuple[str, str]:
    """Returns the name and the path of NAME=PATH.

    Raises:
        ConfigError: it is not of this form.
    """
    name, equals, path = setting.partition("=")
    if not equals or not valid_name(name) or not path:
        raise ConfigError(f"lora: {setting!r} is not of the form NAME=PATH", "lora")
    return name, path
