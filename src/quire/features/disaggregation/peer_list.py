"""The servers that this engine asks to compute prompts.

There is one policy for all failures. A request asks at most two peers, each once, and asks the
second only if no block has come from the first. Otherwise the engine computes the prompt itself.
After a failure the engine does not ask the peer for some seconds, and for longer if the peer does
not match.
"""

from __future__ import annotations

import http.client
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError
from quire.features.disaggregation.facts import KVFacts, differences
from quire.features.disaggregation.messages import Grant, PromptRequest, Welcome
from quire.http_client import HttpClient
from quire.runner.transfer.layer_reads import sees_clock

_log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0
"""Seconds that a peer may take to answer over HTTP. It answers before it computes the prompt."""
_PAUSES = {"dead": 2.0, "timeout": 2.0, "overloaded": 0.5, "refused": 10.0}
"""Seconds for which a peer is not asked, by its last outcome."""
_MOST_ANSWER_BYTES = 1 << 20


Answer = TypeVar("Answer", Grant, Welcome)


class PeerError(Exception):
    """A peer gave no grant. outcome: see `OUTCOMES`."""

    def __init__(self, outcome: str, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.status = status


class Peer:
    """A server that computes prompts. From any thread.

    Attributes:
        pulls: number of running pulls from the peer.
        memory: description of the peer's memory, from the last handshake.
    """

    def __init__(self, url: str, key: str | None, facts: KVFacts) -> None:
        self._client = HttpClient(url, key, _ASK_SECONDS)
        self.url = self._client.url
        host = urlsplit(self.url).hostname
        if host is None:
            raise ConfigError(f"peer: {url!r} names no host", "peer")
        self.host = host
        self.pulls = 0
        self._facts = facts
        self._epoch = ""
        self.memory = b""
        self.layers = False
        """Whether this engine can read the peer's layer clock."""
        self._not_before = 0.0
        self._refusal: tuple[str, str] | None = None
        """The outcome and the reason of the last handshake, if it failed."""
        self._lock = threading.Lock()
        self.reader = secrets.token_hex(8)

    @property
    def up(self) -> bool:
        """Whether the peer may be asked now."""
        return time.monotonic() >= self._not_before

    def failed(self, outcome: str) -> None:
        """Pauses requests to the peer for a while."""
        self._not_before = time.monotonic() + _PAUSES.get(outcome, 0.0)

    def ask(
        self,
        tokens: Sequence[int],
        first: int,
        salt: str,
        traceparent: str = "",
        weights: str = "",
    ) -> Grant:
        """Asks the peer to compute a prompt. Raises PeerError.

        Args:
            tokens: the prompt's tokens, in whole blocks.
            first: number of leading blocks that this engine has.
            salt: the request's `cache_salt`.
            traceparent: context of the request's trace; "" without a trace.
            weights: id of this engine's weights. A peer with others refuses.
        """
        with self._lock:
            if self._refusal is not None and not self.up:
                # Another thread has just had this failure. A new handshake would only wait again.
                raise PeerError(*self._refusal)
            epoch = self._epoch or self._shake_hands()
        request = PromptRequest(list(tokens), first, self.reader, epoch, salt, self.layers, weights)
        try:
            return self._post("/kv/prefill", request, Grant, traceparent)
        except PeerError as error:
            if error.status != 409:
                raise
        with self._lock:  # The peer was restarted after the handshake.
            epoch = self._shake_hands()
        request = msgspec.structs.replace(request, epoch=epoch)
        return self._post("/kv/prefill", request, Grant, traceparent)

    def _shake_hands(self) -> str:
        """Compares facts, and returns the peer's epoch. If they differ, pauses the peer and raises
        PeerError."""
        self._epoch = ""
        try:
            welcome = self._post("/kv/handshake", self._facts, Welcome)
            if found := differences(self._facts, welcome.facts):
                raise PeerError("refused", "; ".join(found), 409)
        except PeerError as error:
            self._refusal = error.outcome, str(error)
            self.failed(error.outcome)
            raise
        self._refusal = None
        self._epoch, self.memory = welcome.epoch, welcome.memory
        self.layers = sees_clock(welcome.memory)
        return welcome.epoch

    def _post(
        self, path: str, body: msgspec.Struct, kind: type[Answer], traceparent: str = ""
    ) -> Answer:
        headers = {"traceparent": traceparent} if traceparent else None
        try:
            connection, answer = self._client.request(
                "POST", path, msgspec.json.encode(body).decode(), headers
            )
        except ConfigError as error:
            outcome = "timeout" if "timed out" in str(error) else "dead"
            raise PeerError(outcome, str(error)) from None
        try:
            data = answer.read(_MOST_ANSWER_BYTES)
            if answer.status != 200:
                raise PeerError(
                    _outcome(answer.status),
                    f"{self.url} answered {answer.status}: {_reason(data)}",
                    answer.status,
                )
            return msgspec.json.decode(data, type=kind)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError("dead", f"{self.url}: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError("broken", f"{self.url} gave no valid answer: {error}") from None
        finally:
            connection.close()


def _outcome(status: int) -> str:
    if status in (408, 504):
        return "timeout"
    if status in (429, 503):
        return "overloaded"
    return "dead" if status in (500, 502) else "refused"


def _reason(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")


class PeerList:
    """All peers. From any thread.

    Raises:
        ConfigError: An address is invalid.
    """

    def __init__(self, urls: Sequence[str], key: str | None, facts: KVFacts) -> None:
        self._key = key
        self._facts = facts
        self._peers: list[Peer] = []
        self.replace(urls)

    @property
    def urls(self) -> list[str]:
        """Returns the addresses."""
        return [peer.url for peer in self._peers]

    def replace(self, urls: Sequence[str]) -> None:
        """Replaces the peers. Running requests go on.

        Raises:
            ConfigError: An address is invalid.
        """
        known = {peer.url: peer for peer in self._peers}
        fresh = [Peer(url, self._key, self._facts) for url in urls]
        self._peers = [known.get(peer.url, peer) for peer in fresh]

    @property
    def up(self) -> int:
        """Counts the peers that may be asked now."""
        return sum(peer.up for peer in self._peers)

    def choose(self, without: Peer | None = None, url: str | None = None) -> Peer | None:
        """Returns the peer with the fewest pulls among those that may be asked; None if there is
        none.

        Args:
            without: a peer to leave out.
            url: address of the only peer to consider; None: all.
        """
        able = [
            peer
            for peer in self._peers
            if peer.up and peer is not without and url in (None, peer.url)
        ]
        return min(able, key=lambda peer: peer.pulls, default=None)
