"""The API keys of `--api-key` and of a key file, with the limits of each key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.server.args import ServerArgs, check_secret
from quire.system import read_bounded

logger = logging.getLogger("quire.server")

MAX_KEYS = 2048
MAX_FILE_BYTES = 4 << 20

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_FIELDS = (
    "key", "key_sha256", "requests_per_minute", "tokens_per_minute", "share", "models", "admin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key.

    Attributes:
        name: the key's name in logs, limits and traces.
        digest: SHA-256 of the secret.
        requests_per_minute, tokens_per_minute: rate limits; None is unlimited.
        share: weight of the key's requests in the engine's fair scheduling.
        models: names of the models and adapters that it may use; None allows all.
        admin: the key may load and unload adapters, read the settings and clear the prefix cache.
    """

    name: str
    digest: bytes = b""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share: float = 1.0
    models: frozenset[str] | None = None
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class ApiKeys:
    """All API keys of a server.

    Attributes:
        anonymous: the key of every request to a server without keys.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._args = args
        self.anonymous = self._key("", b"", admin=True)
        self._salt = secrets.token_bytes(32)
        self._by_tag: dict[bytes, ApiKey] = {}
        self.load()

    @property
    def required(self) -> bool:
        """Tells whether requests need a key."""
        return bool(self._args.api_key) or self._args.api_key_file is not None

    def load(self) -> None:
        """Reads the key file.

        Raises:
            ConfigError: the file is invalid. The keys stay as they were.
        """
        keys = [
            self._key(f"api-key-{place}", digest_of(secret.encode()), admin=True)
            for place, secret in enumerate(self._args.api_key, 1)
        ]
        if self._args.api_key_file is not None:
            keys += self._read(Path(self._args.api_key_file))
        _check_unique(keys)
        self._by_tag = {self._tag(key.digest): key for key in keys}

    def reload(self) -> None:
        """Reads the key file again; errors go to the log."""
        try:
            self.load()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d keys", len(self._by_tag))

    def find(self, secret: bytes) -> ApiKey | None:
        """Returns the key with this secret; None if there is none.

        The time that it takes reveals nothing about the keys. They are looked up by a hash with a
        random salt, which a client cannot predict, and are compared in constant time.
        """
        digest = digest_of(secret)
        key = self._by_tag.get(self._tag(digest), self.anonymous)
        return key if hmac.compare_digest(digest, key.digest) else None

    def admin_digests(self) -> list[bytes]:
        """Returns the digests of the admins' keys; an empty list without keys."""
        return [key.digest for key in self._by_tag.values() if key.admin]

    def find_by_digest(self, digest: bytes) -> ApiKey | None:
        """Returns the key with this digest; None if it was removed.

        Args:
            digest: a digest that this server has stored. A client must not be able to choose it.
        """
        if not self.required:
            return self.anonymous if digest == self.anonymous.digest else None
        return self._by_tag.get(self._tag(digest))

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._salt, digest, "sha256")

    def _key(self, name: str, digest: bytes, **fields: Any) -> ApiKey:
        for limit in ("requests_per_minute", "tokens_per_minute"):
            fields[limit] = fields.get(limit, getattr(self._args, limit)) or None
        return ApiKey(name, digest, **fields)

    def _read(self, path: Path) -> list[ApiKey]:
        try:
            raw = read_bounded(path, MAX_FILE_BYTES)
            mode = path.stat().st_mode
        except OSError as error:
            raise _key_file_error(f"cannot read {path}: {error.strerror}") from None
        try:
            tables = tomllib.loads(raw.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise _key_file_error(f"{path} is not valid TOML: {error}") from None
        if len(tables) > MAX_KEYS:
            raise _key_file_error(f"{path} has {len(tables)} keys; at most {MAX_KEYS} are possible")
        if mode & (stat.S_IRGRP | stat.S_IROTH) and any("key" in t for t in tables.values()):
            logger.warning("%s holds keys and can be read by other users", path)
        return [self._parse(path, name, table) for name, table in tables.items()]

    def _parse(self, path: Path, name: str, table: Any) -> ApiKey:
        where = f"{path}, [{name[:64]}]"
        if not _NAME.fullmatch(name):
            raise _key_file_error(
                f"{where}: a name is 1 to 64 of A-Z, a-z, 0-9, '.', '_', '@' and '-'"
            )
        if not isinstance(table, dict):
            raise _key_file_error(f"{where}: must be a table, as in [{name}]")
        for field in table:
            if field not in _FIELDS:
                raise _key_file_error(
                    f"{where}: unknown {field[:64]!r}; known are {', '.join(_FIELDS)}"
                )
        fields: dict[str, Any] = {}
        for limit in ("requests_per_minute", "tokens_per_minute"):
            value = table.get(limit)
            if value is not None:
                if type(value) is not int or not 0 <= value <= 10**12:
                    raise _key_file_error(
                        f"{where}: {limit} must be an integer >= 0 (0 is no limit)"
                    )
                fields[limit] = value
        share = table.get("share", 1.0)
        if type(share) not in (int, float) or not (math.isfinite(share) and 0.01 <= share <= 100):
            raise _key_file_error(f"{where}: share must be a number from 0.01 to 100")
        models = table.get("models")
        if models is not None:
            if not isinstance(models, list) or not all(isinstance(m, str) and m for m in models):
                raise _key_file_error(f"{where}: models must be a list of names")
            fields["models"] = frozenset(models)
        admin = table.get("admin", False)
        if type(admin) is not bool:
            raise _key_file_error(f"{where}: admin must be true or false")
        fields["admin"] = admin
        return self._key(name, _read_digest(table, where), share=float(share), **fields)


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _read_digest(table: dict[str, Any], where: str) -> bytes:
    secret, digest = table.get("key"), table.get("key_sha256")
    if (secret is None) == (digest is None):
        raise _key_file_error(f"{where}: needs one of key and key_sha256")
    if secret is not None:
        if not isinstance(secret, str) or not check_secret(secret):
            raise _key_file_error(f"{where}: key must be printable ASCII without spaces")
        return digest_of(secret.encode())
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise _key_file_error(f"{where}: key_sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _check_unique(keys: Iterable[ApiKey]) -> None:
    names: dict[bytes, str] = {}
    taken = set()
    for key in keys:
        if key.digest in names:
            raise _key_file_error(f"{names[key.digest]} and {key.name} have the same key")
        if key.name in taken:
            raise _key_file_error(f"there are two keys of the name {key.name}")
        names[key.digest] = key.name
        taken.add(key.name)


def _key_file_error(message: str) -> ConfigError:
    return ConfigError(f"api_key_file: {message}", "api_key_file")
