"""Listening sockets: TCP or Unix, with or without TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.server.args import ServerArgs
from quire.server.http.hosts import is_loopback

logger = logging.getLogger("quire.server")

_MOST_PATH_BYTES = 107
_SIOCGIFADDR = 0x8915
"""Asks Linux for an interface's address (netdevice(7))."""


def bind(args: ServerArgs, *, shared: bool = False) -> socket.socket:
    """Returns a bound socket that does not listen yet.

    Connections are therefore refused until the engine is ready.

    Args:
        shared: other processes of this user may bind the same port and share its connections.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if args.uds is not None:
        return _bind_unix(args.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        message = f"host {args.host!r} is not an address: {error.strerror}"
        raise ConfigError(message, "host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        message = f"cannot listen on {args.host}:{args.port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            message += "; choose another port with --port, or --port 0 for a free one"
        elif error.errno == errno.EACCES:
            message += "; choose a port from 1024 on with --port"
        raise ConfigError(message, "port") from None
    return sock


def bind_all(args: ServerArgs, *, shared: bool = False) -> list[socket.socket]:
    """Returns the API's bound socket, and with `ollama_api` one for that port.

    Raises:
        ConfigError: an address cannot be bound.
    """
    first = bind(args, shared=shared)
    if args.ollama_api is None:
        return [first]
    try:
        ollama = dataclasses.replace(args, port=args.ollama_api, ollama_api=None, uds=None)
        return [first, bind(ollama, shared=shared)]
    except ConfigError as error:
        first.close()
        message = str(error).replace("--port", "--ollama-api")
        raise ConfigError(f"ollama_api: {message}", "ollama_api") from None


def _bind_unix(path: str) -> socket.socket:
    """Binds a Unix socket that only this user and group may connect to.

    The stale socket of an earlier server is removed. Any other file is an error.
    """
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ConfigError(
            f"uds: a Unix socket's path has at most {_MOST_PATH_BYTES} bytes, got "
            f"{len(os.fsencode(path))}",
            "uds",
        )
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o007)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}", "uds") from None
    finally:
        os.umask(before)
    return sock


@contextlib.contextmanager
def closing_sockets(sockets: list[socket.socket], args: ServerArgs) -> Iterator[None]:
    """Closes the sockets at the end, and removes a Unix socket's file."""
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)


def _remove_stale(path: str) -> None:
    try:
        found = os.stat(path)
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"cannot listen on {path}: there is a file of that name", "uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror}", "uds") from None
        else:
            raise ConfigError(f"cannot listen on {path}: a server is there already", "uds")


def tls_context(args: ServerArgs) -> ssl.SSLContext | None:
    """Returns a context for TLS 1.2 or newer, or None without TLS.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    if args.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a callback OpenSSL would ask for a key's password on the terminal.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        message = f"cannot use {args.ssl_certfile}: {_reason(error)}"
        raise ConfigError(message, "ssl_certfile") from None
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except (OSError, ValueError) as error:
            message = f"cannot use {args.ssl_ca_certs}: {_reason(error)}"
            raise ConfigError(message, "ssl_ca_certs") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; the server needs one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "the files have no matching certificate and key in PEM"
    return getattr(error, "strerror", None) or str(error)


def url_of(sock: socket.socket, args: ServerArgs) -> str:
    """Returns the URL of a bound socket on this machine; `unix:PATH` for a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    scheme = "http" if args.ssl_certfile is None else "https"
    host, port = sock.getsockname()[:2]
    address: Any = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "localhost"
    elif address.version == 6:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


def reachable_urls(url: str, host: str) -> list[str]:
    """Returns the URLs, with IPv4 addresses, under which other machines reach a server.

    Args:
        url: the server's URL on this machine, see `url_of`.
        host: the address it listens on. Only 0.0.0.0 and :: give a result, because for any other
            address `url` is enough.
    """
    if host not in ("0.0.0.0", "::") or not url.startswith("http"):
        return []
    scheme, port = url.partition("://")[0], url.rpartition(":")[2]
    return [f"{scheme}://{address}:{port}" for address in _own_addresses()]


def _own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this machine's interfaces, except loopback addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not is_loopback(address):
                found.append(address)
    return found


def warn_if_open(args: ServerArgs) -> None:
    """Logs a warning if other machines can use the server without a key."""
    if args.api_key or args.api_key_file or args.ssl_ca_certs or args.uds:
        return
    if not is_loopback(args.host):
        logger.warning("%s can be reached by other machines and no --api-key is set", args.host)
