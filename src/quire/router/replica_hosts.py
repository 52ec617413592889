"""The setting `replica_hosts`: from which hosts servers may join a router's fleet."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from quire.errors import ConfigError, QuireError
from quire.http_client import split_url


class ReplicaNotAllowedError(QuireError):
    """A server may not join from its address."""


class ReplicaHosts:
    """Decides which addresses may join, before the router sends anything to them.

    Args:
        entries: HOST, HOST:PORT, *.DOMAIN for all names in a domain, a network such as 10.0.0.0/8,
            or * for any host. Servers at a HOST:PORT may also get the replicas' key.

    Raises:
        ConfigError: an entry has none of these forms.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._any = False
        self._names: set[str] = set()
        self._endings: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._places: set[tuple[str, int]] = set()
        for entry in entries:
            self._add(entry)

    def _add(self, entry: str) -> None:
        if entry == "*":
            self._any = True
        elif entry.startswith("*.") and len(entry) > 2:
            self._endings.add(entry[1:].lower())
        elif (network := _network(entry)) is not None:
            self._networks.append(network)
        else:
            host, port = _place(entry)
            if port is None:
                self._names.add(host)
            else:
                self.trust(host, port)

    def trust(self, host: str, port: int) -> None:
        """Allows an address to join and to get the replicas' key."""
        self._places.add((host, port))

    def trusts(self, host: str, port: int) -> bool:
        """Tells whether the address may get the replicas' key without a proof."""
        return (host, port) in self._places

    def check(self, host: str, port: int) -> None:
        """Checks an address.

        Raises:
            ReplicaNotAllowedError: a server at this address may not join.
        """
        if not (self._any or self.trusts(host, port) or self._knows(host)):
            raise ReplicaNotAllowedError(
                f"a server at {host!r}, port {port}, may not join: --replica-hosts does not name it"
            )

    def _knows(self, host: str) -> bool:
        if host in self._names or any(host.endswith(end) for end in self._endings):
            return True
        network = _network(host)
        return network is not None and any(
            network.version == known.version and network.subnet_of(known)  # type: ignore[arg-type]
            for known in self._networks
        )


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Parses a network, or an address as a network of one. Returns None for any other text."""
    try:
        return ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError:
        return None


def _place(entry: str) -> tuple[str, int | None]:
    try:
        parts = split_url(f"http://{entry}")
    except ConfigError:
        parts = None
    if parts is None or parts.netloc != entry or parts.hostname is None or "@" in entry:
        raise ConfigError(
            f"replica_hosts: {entry[:200]!r} is not HOST, HOST:PORT, *.NAME, a network or *",
            "replica_hosts",
        )
    return parts.hostname, parts.port
