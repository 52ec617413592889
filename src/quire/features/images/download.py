"""Downloads images that requests name by URL, from allowed hosts only.

A name is resolved once, and the connection goes to the address that was checked. So a name server
cannot answer with a public address first and a private one later.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from quire.features.images.image_sources import refused, too_large

_REDIRECTS = 3
_CHUNK = 1 << 16
_PORTS = {"http": 80, "https": 443}
_MOST_URL = 4096
_UNKNOWN = "application/octet-stream"

Address = tuple[socket.AddressFamily, str]


def fetch(
    url: str,
    hosts: Sequence[str],
    *,
    most: int,
    seconds: float,
    param: str,
    flag: str = "--max-image-bytes",
) -> tuple[bytes, str | None]:
    """Returns the bytes of an image at a URL, and the type that the host declares.

    Args:
        hosts: hosts that may be asked: names, or *.name for all names below.
        most: most bytes.
        seconds: most seconds of the whole download.
        param: the request's field, for errors.
        flag: sets `most`.

    Raises:
        RequestError: the host is not allowed or has a private address, or the download fails.
    """
    deadline, first = time.monotonic() + seconds, ""
    for _ in range(1 + _REDIRECTS):
        parts = _split(url, hosts, param)
        if first and parts.hostname != first:
            raise refused(param, f"{first!r} redirects to another host.")
        first = parts.hostname or ""
        try:
            found, data = _get(parts, most, deadline, param, flag)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise refused(
                    param,
                    f"the download took longer than {seconds:g} seconds (--image-fetch-seconds).",
                ) from None
            raise refused(param, f"{first!r} cannot be reached ({type(error).__name__}).") from None
        if found.status in (301, 302, 303, 307, 308):
            url = urljoin(url, found.headers.get("location", ""))
            continue
        if found.status != 200:
            raise refused(param, f"{first!r} answers with status {found.status}.")
        kind = found.headers.get_content_type() if "content-type" in found.headers else _UNKNOWN
        return data, None if kind == _UNKNOWN else kind
    raise refused(param, f"{first!r} redirects more than {_REDIRECTS} times.")


def _split(url: str, hosts: Sequence[str], param: str) -> SplitResult:
    """Returns the parts of a URL, if it is one of an allowed host."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        known = bool(host) and parts.port != 0 and parts.scheme in _PORTS and len(url) <= _MOST_URL
    except ValueError:
        known = False
    if not known or not url.isascii() or not url.isprintable() or " " in url:
        raise refused(param, "it is neither a data URI nor an http address.")
    if parts.username is not None or parts.password is not None:
        raise refused(param, "an address with a password is not supported.")
    if not hosts:
        raise refused(
            param,
            "this server downloads no images (--allow-image-hosts); send it as a data URI.",
            "unsupported_parameter",
        )
    if not any(_matches(host, allowed) for allowed in hosts):
        raise refused(
            param, f"the host {host[:100]!r} is not allowed (--allow-image-hosts).", "invalid_value"
        )
    return parts


def _matches(host: str, allowed: str) -> bool:
    allowed = allowed.lower()
    return host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed


def _get(
    parts: SplitResult, most: int, deadline: float, param: str, flag: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """Sends one GET. Returns the answer, and its body if its status is 200."""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    address = _public_address(host, port, param)
    with _connect(address, port, deadline) as plain:
        plain.settimeout(_left(deadline))
        secure = parts.scheme == "https"
        # The certificate must be that of the name, not of the address.
        context = ssl.create_default_context() if secure else None
        link = plain if context is None else context.wrap_socket(plain, server_hostname=host)
        with link:
            path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            name = host if parts.port is None else f"{host}:{port}"
            link.settimeout(_left(deadline))
            link.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {name}\r\nAccept: image/*, video/*\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode()
            )
            found = http.client.HTTPResponse(link, method="GET")
            found.begin()
            if found.status != 200:
                return found, b""
            return found, _body(found, link, most, deadline, param, flag)


def _body(
    found: http.client.HTTPResponse,
    link: socket.socket,
    most: int,
    deadline: float,
    param: str,
    flag: str,
) -> bytes:
    if (found.length or 0) > most:
        raise too_large(found.length or 0, most, param, flag)
    data = bytearray()
    while True:
        link.settimeout(_left(deadline))
        piece = found.read1(_CHUNK)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > most:
            raise too_large(len(data), most, param, flag)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _public_address(host: str, port: int, param: str) -> Address:
    """Returns an address of a host, all of whose addresses are public."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(family, str(place[0])) for family, *_, place in found]
    for _, address in addresses:
        if not is_public(address):
            raise refused(param, f"the host {host[:100]!r} has a private address.", "invalid_value")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner:
            return is_public(str(inner))
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
    return found.is_global and not found.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _connect(address: Address, port: int, deadline: float) -> socket.socket:
    family, name = address
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        link.settimeout(_left(deadline))
        link.connect((name, port))
    except BaseException:
        link.close()
        raise
    return link
