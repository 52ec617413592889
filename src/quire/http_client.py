"""A small HTTP client with which the terminal's commands call a server with OpenAI's API."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlsplit

from quire.errors import ConfigError

_MOST_NAME = 253
"""Most characters of a host's name (RFC 1035)."""


def split_url(url: str, param: str = "url") -> SplitResult:
    """Splits a server's address into its parts.

    Args:
        url: the address; http:// may be left out.
        param: name of the setting that holds the address, for the error.

    Raises:
        ConfigError: `url` is not an http address.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port  # raises ValueError if it is not a number
        name = (parts.hostname or "").encode("idna")  # raises ValueError if a label is too long
        if len(name) > _MOST_NAME:
            raise ValueError(name)
    except ValueError:
        port = 0
    printed = url.isascii() and url.isprintable() and " " not in url
    if port == 0 or not printed or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url[:200]!r} is not an http address", param)
    return parts


class HttpClient:
    """Sends requests to one server, each on a new connection.

    Args:
        url: the server's address, with or without http:// and a trailing /v1.
        api_key: bearer key; None sends none.
        timeout: seconds that connecting may take, and that each read may take.

    Attributes:
        address: host and port.
        url: the address with its scheme and without /v1.

    Raises:
        ConfigError: `url` is not an http address, or the key is not printable ASCII.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = split_url(url)
        self._secure = parts.scheme == "https"
        self.address = parts.netloc.rpartition("@")[2]
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.address}{self._base}"
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("api_key must be printable ASCII", "api_key")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(
        self,
        method: str,
        path: str,
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request and waits for the head of its answer.

        Args:
            path: path without the base path of `url`.
            headers: further headers.

        Returns:
            The connection, which the caller closes, and the answer with any status.

        Raises:
            ConfigError: the server cannot be reached.
        """
        make: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        )
        connection = make(self.address, timeout=self._timeout)
        try:
            connection.request(
                method, self._base + path, body, {**self._headers, **(headers or {})}
            )
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConfigError(f"cannot reach {self.address}: {error}", "url") from None
