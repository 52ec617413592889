"""Proofs for a router: a server has the key, and an answer belongs to its request."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable

TAG_HEADER = b"x-quire-tag"

_TAG = re.compile(rb"[0-9a-f]{1,32}")


def tag_in(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the tag among headers; None if there is none, or what no router sends."""
    for name, value in headers:
        if name == TAG_HEADER:
            return value if _TAG.fullmatch(value) else None
    return None


# A proof that a server has a key, which the key is not sent for.

CHALLENGE_HEADER = b"x-quire-challenge"
PROOF_HEADER = b"x-quire-proof"

_CHALLENGE = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{64})")


class Challenge:
    """A router's question. digest: SHA-256 of the replicas' key. header: its value."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._nonce = secrets.token_hex(16).encode()
        self.header = self._nonce + b"." + _mac(digest, b"router", self._nonce)

    def is_met(self, proof: bytes, address: tuple[str, int | None] | None) -> bool:
        """Tells whether an answer proves the key. address: to which the question was sent."""
        place = _address_bytes(address)
        if place is None:
            return False
        return hmac.compare_digest(proof, _mac(self._digest, b"replica", self._nonce, place))


def prove(
    header: bytes, digests: Iterable[bytes], address: tuple[str, int | None] | None
) -> bytes | None:
    """Returns the answer to a challenge; None where none of the keys meets it.

    Args:
        header: the challenge.
        digests: of the keys that may be proved.
        address: this end of the connection.
    """
    match, place = _CHALLENGE.fullmatch(header), _address_bytes(address)
    if match is None or place is None:
        return None
    nonce, mac = match.groups()
    for digest in digests:
        if hmac.compare_digest(mac, _mac(digest, b"router", nonce)):
            return _mac(digest, b"replica", nonce, place)
    return None


def _address_bytes(address: tuple[str, int | None] | None) -> bytes | None:
    """Returns an address and its port as both ends write them; None for what has none, such as a
    Unix socket."""
    if address is None:
        return None
    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        host = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return None
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return f"{host} {address[1]}".encode()


def _mac(digest: bytes, *parts: bytes) -> bytes:
    return hmac.digest(digest, b"quire " + b" ".join(parts), "sha256").hex().encode()
