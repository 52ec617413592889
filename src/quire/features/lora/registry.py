"""The adapters of an engine, by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError

CONFIG = "adapter_config.json"
"""The file that makes a folder an adapter."""

_NAME = re.compile(r"[^\s/\\\x00-\x1f.][^\\\x00-\x1f]{0,255}")
_FOLDER = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,254}")


@dataclass(eq=False, slots=True)
class Version:
    """An adapter as it was when it got its name. Requests keep the version that they began with.

    Attributes:
        path: its folder.
        digest: digest of its contents; "" until it was read.
        hub_id: the hub id that the caller named; "" for a local folder.
    """

    name: str
    path: str
    digest: str = ""
    hub_id: str = ""

    @property
    def key(self) -> int:
        """Identifies the contents in the keys of the prefix tree. Never 0."""
        return int(self.digest[:15], 16) | 1 << 60


class Registry:
    """The names of adapters.

    Args:
        folder: a folder of adapters. Each subfolder with an adapter is an adapter of the same name,
            which is read when a request first names it.
    """

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
        """Returns a name's current version; None: the name is unknown."""
        known = self._versions.get(name)
        if known is None and (path := folder_of(self._folder, name)) is not None:
            known = self._versions[name] = Version(name, str(path))
        return known

    def set(self, version: Version) -> None:
        self._versions[version.name] = version

    def renew(self, version: Version) -> None:
        """Forgets a version of the folder of adapters, because its files have changed. Later
        requests read it anew."""
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
    """Returns the subfolder of an adapter in a folder of adapters; None: there is no such
    adapter."""
    if folder is None or not _FOLDER.fullmatch(name):
        return None
    path = folder / name
    # `Path.is_file` raises an error for names that are too long for the system.
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
    """Returns whether an adapter may have this name.

    A name has 1 to 256 characters, and does not begin with a dot, slash or space.
    """
    return _NAME.fullmatch(name) is not None


def parse_setting(setting: str) -> tuple[str, str]:
    """Returns the name and the path of NAME=PATH.

    Raises:
        ConfigError: the setting does not have this form.
    """
    name, equals, path = setting.partition("=")
    if not equals or not valid_name(name) or not path:
        raise ConfigError(f"lora: {setting!r} is not of the form NAME=PATH", "lora")
    return name, path


# The device's slots: the adapter in each slot, and the requests that use it.


@dataclass(slots=True)
class Slot:
    """A slot of the device.

    Attributes:
        digest: digest of the adapter in it; "" if it is empty.
        users: ids of the requests that use it.
        used: time of its last use, counted in beginnings and ends of requests.
    """

    digest: str = ""
    users: set[str] = field(default_factory=set)
    used: int = 0


class SlotTable:
    """The slots of a device. Slots are found by digest, so adapters with the same contents share a
    slot.

    A slot in use is never given away. If an adapter waits and all slots are in use, the least
    recently used slot is closed. It takes no new requests, so it becomes free in any case.
    """

    def __init__(self, count: int) -> None:
        self._slots = [Slot() for _ in range(count)]
        self._places: dict[str, int] = {}
        self._closed: set[int] = set()
        self._events = 0

    @property
    def resident(self) -> int:
        """The number of slots that hold an adapter."""
        return len(self._places)

    def place(self, digest: str) -> int:
        """Returns the slot of an adapter, -1 if it has none."""
        return self._places.get(digest, -1)

    def enter(self, digest: str, request_id: str) -> bool:
        """Adds a request to an adapter's slot. Returns False if the adapter has no slot, or the
        slot is closed."""
        place = self.place(digest)
        if place < 0:
            return False
        slot = self._slots[place]
        if request_id in slot.users:
            return True
        if place in self._closed:
            return False
        slot.users.add(request_id)
        self._touch(slot)
        return True

    def leave(self, digest: str, request_id: str) -> None:
        """Removes a request from its adapter's slot. Idempotent."""
        place = self.place(digest)
        if place >= 0 and request_id in self._slots[place].users:
            self._slots[place].users.discard(request_id)
            self._touch(self._slots[place])

    def take(self) -> int:
        """Empties the least recently used slot that no request uses. Returns its place; -1 if all
        slots are in use."""
        free = [place for place, slot in enumerate(self._slots) if not slot.users]
        if not free:
            open_ones = [p for p in range(len(self._slots)) if p not in self._closed]
            if not self._closed and open_ones:
                self._closed.add(min(open_ones, key=lambda place: self._slots[place].used))
            return -1
        place = min(free, key=lambda p: (p not in self._closed, self._slots[p].used))
        self._closed.discard(place)
        slot = self._slots[place]
        self._places.pop(slot.digest, None)
        slot.digest = ""
        return place

    def fill(self, place: int, digest: str) -> None:
        """Records that an empty slot now holds an adapter."""
        slot = self._slots[place]
        slot.digest = digest
        self._places[digest] = place
        self._touch(slot)

    def reopen(self) -> None:
        """Opens closed slots, because no adapter waits any more."""
        self._closed.clear()

    def _touch(self, slot: Slot) -> None:
        self._events += 1
        slot.used = self._events
