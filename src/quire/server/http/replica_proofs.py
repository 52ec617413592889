"""Proofs for a router: that a server has the key, and that an answer belongs to its request."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable

TAG_HEADER = b"x-quire-tag"

_TAG = re.compile(rb"[0-9a-f]{1,32}")


def tag_in(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the router's tag among headers; None if it is missing or malformed."""
    for name, value in headers:
        if name == TAG_HEADER:
            return value if _TAG.fullmatch(value) else None
    return None


# A router sends a challenge, and a server proves by HMAC that it has the key. The key itself is not
# sent. The proof contains the server's address, so another server cannot forward it as its own.

CHALLENGE_HEADER = b"x-quire-challenge"
PROOF_HEADER = b"x-quire-proof"

_CHALLENGE = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{64})")


class Challenge:
    """A router's challenge to a server.

    Args:
        digest: SHA-256 of the replicas' key.

    Attributes:
        header: value of `CHALLENGE_HEADER`.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._nonce = secrets.token_hex(16).encode()
        self.header = self._nonce + b"." + _mac(digest, b"router", self._nonce)

    def is_met(self, proof: bytes, address: tuple[str, int | None] | None) -> bool:
        """Tells whether an answer proves that its sender has the key.

        Args:
            proof: value of `PROOF_HEADER`.
            address: address and port that the router is connected to.
        """
        place = _address_bytes(address)
        if place is None:
            return False
        return hmac.compare_digest(proof, _mac(self._digest, b"replica", self._nonce, place))


def prove(
    header: bytes, digests: Iterable[bytes], address: tuple[str, int | None] | None
) -> bytes | None:
    """Returns the proof for a challenge; None if no key matches it.

    Args:
        header: value of `CHALLENGE_HEADER`.
        digests: digests of this server's keys.
        address: address and port of the server's end of the connection.
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
    """Returns an address and port in the form that both ends use; None for a Unix socket."""
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
