"""Checks `Host` and `Origin`, so that pages of other sites cannot use a local server."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope

from quire.server.args import ServerArgs
from quire.server.errors import ApiError

ANY = "*"


class HostCheck:
    """Refuses hosts and origins that are not this server's.

    A server on a loopback address without keys trusts everyone who can reach it. A page in a
    browser on the machine can reach it under a domain that resolves to 127.0.0.1 (DNS rebinding).
    The browser sends that domain in `Host`, so unknown names are refused. Addresses and `localhost`
    pass, because they cannot be rebound.

    With `allowed_hosts` names are checked on any address, with and without keys.
    """

    def __init__(self, args: ServerArgs) -> None:
        keyless = not (args.api_key or args.api_key_file or args.ssl_ca_certs)
        local = keyless and args.uds is None and is_loopback(args.host)
        self._active = ANY not in args.allowed_hosts and (local or bool(args.allowed_hosts))
        self._allowed = frozenset(map(str.lower, args.allowed_hosts))
        self._hosts = {"localhost", args.host.lower(), *self._allowed}
        self._origins = frozenset(args.cors_origins)

    def check(self, scope: Scope) -> None:
        """Checks a request.

        Raises:
            ApiError: 403.
        """
        if not self._active:
            return
        own = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for host in own:
            if not self._known(host):
                raise ApiError(
                    403,
                    f"The host {host[:200]!r} is not one of this server's; --allowed-hosts adds "
                    "names.",
                    code="host_not_allowed",
                )
        self._check_origin(scope, own)

    def check_socket(self, scope: Scope) -> None:
        """Checks the handshake of a WebSocket.

        Browsers ask no permission (CORS) before they open one, so its origin is always checked.

        Raises:
            ApiError: 403.
        """
        self.check(scope)
        own = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        self._check_origin(scope, own)

    def _check_origin(self, scope: Scope, own: list[str]) -> None:
        for name, value in scope["headers"]:
            if name == b"origin" and not self._may_ask(value.decode("latin-1"), own):
                raise ApiError(
                    403,
                    f"Pages of {value.decode('latin-1')[:200]!r} may not ask this server; "
                    "--cors-origins lets them.",
                    code="origin_not_allowed",
                )

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name.rstrip(".") in self._hosts or _is_address(name)

    def _may_ask(self, origin: str, own: list[str]) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        # The scheme is not compared, because a proxy may have changed it.
        return bool(parts.netloc) and (parts.netloc in own or parts.hostname in self._allowed)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
