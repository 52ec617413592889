"""The router's own requests to replicas: health checks, peers and events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quire.features.kv_events.messages import KVEventLine
from quire.router.replica import ModelEntry, RoutedReplica
from quire.router.upstream import Headers, ReplicaAnswer, ReplicaLostError
from quire.server.args import check_secret
from quire.server.context.api_keys import digest_of
from quire.server.http.replica_proofs import CHALLENGE_HEADER, PROOF_HEADER, Challenge

logger = logging.getLogger("quire.router")

_MOST_ANSWER_BYTES = 1 << 22
"""Most bytes of an answer. Even a list of thousands of adapters is smaller."""
_MOST_LINE_BYTES = 1 << 26
_MOST_PEER_NAME = 256


class _Models(msgspec.Struct):
    data: list[ModelEntry] = []


class _ReplicaLoad(msgspec.Struct):
    running: int
    waiting: int
    kv_tokens: int | None = None
    checkpoint: str | None = None


class _Peers(msgspec.Struct):
    peers: list[str]


class QuestionRefusedError(Exception):
    """A replica answered with a status other than 200, or with an invalid body."""


class NotReadyError(Exception):
    """A replica answers, but takes no requests at the moment."""


class LateError(Exception):
    """A replica did not answer in time."""


Answer = TypeVar("Answer")


def _decode(target: str, data: bytes | bytearray, kind: type[Answer]) -> Answer:
    """Decodes an answer's JSON.

    Raises:
        QuestionRefusedError: it does not have the expected fields.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise QuestionRefusedError(f"the answer to {target} is invalid: {error}") from None


class Questions:
    """Sends the router's own requests to replicas.

    Args:
        key: API key. It is sent only to replicas that are trusted or have proved that they know it.
        timeout: seconds that an answer may take.
        via: value for the header `Via`, see `Fleet`.
    """

    def __init__(self, key: str | None, timeout: float, via: bytes) -> None:
        self._plain: Headers = [(b"content-type", b"application/json"), (b"via", via)]
        self._key = key.encode() if key else b""
        self._timeout = timeout

    def _headers(self, replica: RoutedReplica) -> Headers:
        if self._key and (replica.trusted or replica.proven):
            return [*self._plain, (b"authorization", b"Bearer " + self._key)]
        return self._plain

    async def check(self, replica: RoutedReplica) -> None:
        """Asks a replica for its readiness, its load and its model.

        It asks for the model every time, because another server may start at the same address.

        Raises:
            NotReadyError: the replica takes no requests at the moment.
            LateError: the replica did not answer within the timeout.
            ReplicaLostError: the replica cannot be reached, or is not a Quire server.
        """
        try:
            await self._ask_ready(replica)
            load = _decode("/load", await self._ask(replica, b"/load"), _ReplicaLoad)
            models = _decode("/v1/models", await self._ask(replica, b"/v1/models"), _Models)
            # Adapters are left out: each server loads its own. The checkpoint's digest replaces
            # the root, because different models may be served under one name.
            replica.set_model(
                frozenset(
                    msgspec.structs.replace(m, root=load.checkpoint or m.root)
                    for m in models.data
                    if m.parent is None
                )
            )
        except QuestionRefusedError as error:
            raise ReplicaLostError(str(error)) from None
        if not replica.state.informed:
            replica.state.reported = load.running + load.waiting
        if load.kv_tokens is not None:
            replica.state.has_room(load.kv_tokens)

    async def announce_peers(self, replica: RoutedReplica, urls: Sequence[str]) -> list[str]:
        """Sends a decode replica the addresses of the prefill replicas.

        Returns:
            The replica's name for each of them, in the same order.

        Raises:
            ReplicaLostError: the replica cannot be reached.
            LateError: the replica did not answer within the timeout.
            QuestionRefusedError: the replica does not use peers, or the key is not an admin's.
        """
        body = msgspec.json.encode(_Peers(list(urls)))
        names = _decode("/kv/peers", await self._ask(replica, b"/kv/peers", body), _Peers).peers
        if len(names) != len(urls):
            raise QuestionRefusedError(f"/kv/peers names {len(names)} of {len(urls)} peers")
        if not all(len(name) <= _MOST_PEER_NAME and check_secret(name) for name in names):
            raise QuestionRefusedError("/kv/peers returned a peer name that no header can hold")
        return names

    async def _ask_ready(self, replica: RoutedReplica) -> None:
        headers, challenge = self._plain, None
        if self._key and not replica.trusted:
            challenge = Challenge(digest_of(self._key))
            headers = [*headers, (CHALLENGE_HEADER, challenge.header)]
        answer, _ = await self._answer(replica, b"/ready", headers)
        status = answer.status
        if challenge is not None:
            proof = next((value for name, value in answer.headers if name == PROOF_HEADER), b"")
            replica.proven = challenge.is_met(proof, answer.peer)
        if status == 503:
            raise NotReadyError("/ready answered 503")
        if status == 508:
            raise QuestionRefusedError("it is this router")
        if status != 200:
            raise QuestionRefusedError(f"/ready answered {status}")
        if challenge is not None and not replica.proven:
            raise QuestionRefusedError(
                "it does not prove that it has the replicas' key at this address; if it is behind "
                "a proxy, trust it with HOST:PORT in --replica-hosts"
            )

    async def _ask(
        self, replica: RoutedReplica, target: bytes, body: bytes | None = None
    ) -> bytearray:
        answer, found = await self._answer(replica, target, self._headers(replica), body)
        status = answer.status
        if status == 503:  # The server is up, but its engine has not answered in time.
            raise LateError(f"{target.decode()} answered 503")
        if status != 200:
            raise QuestionRefusedError(f"{target.decode()} answered {status}")
        return found

    async def _answer(
        self, replica: RoutedReplica, target: bytes, headers: Headers, body: bytes | None = None
    ) -> tuple[ReplicaAnswer, bytearray]:
        method = "GET" if body is None else "PUT"
        try:
            async with asyncio.timeout(self._timeout):
                answer = await replica.upstream.send(method, target, headers, body or b"")
                try:
                    found = bytearray()
                    async for part in answer.parts():
                        found += part
                        if len(found) > _MOST_ANSWER_BYTES:
                            raise QuestionRefusedError(
                                f"{target.decode()} answered more than {_MOST_ANSWER_BYTES} bytes"
                            )
                finally:
                    answer.close()
        except TimeoutError:
            raise LateError(f"no answer to {target.decode()}") from None
        return answer, found

    async def follow_events(self, replica: RoutedReplica) -> None:
        """Reads a replica's KV events into its state until the stream ends.

        Raises:
            ReplicaLostError: the connection ended, or nothing arrived within the timeout.
            QuestionRefusedError: the replica refuses to send events, or sent an invalid one.
        """
        state = replica.state
        try:
            async with asyncio.timeout(self._timeout) as patience:
                headers = self._headers(replica)
                answer = await replica.upstream.send("GET", b"/kv/events", headers, b"")
                try:
                    if answer.status >= 500:
                        raise ReplicaLostError(f"/kv/events answered {answer.status}")
                    if answer.status != 200:
                        raise QuestionRefusedError(f"/kv/events answered {answer.status}")
                    rest = bytearray()
                    async for part in answer.parts():
                        patience.reschedule(asyncio.get_running_loop().time() + self._timeout)
                        rest += part
                        *lines, last = rest.split(b"\n") if b"\n" in part else (rest,)
                        for line in lines:
                            state.take_line(_decode("/kv/events", line, KVEventLine))
                        rest = bytearray(last)
                        if len(rest) > _MOST_LINE_BYTES:
                            raise ReplicaLostError("a line of its events has no end")
                finally:
                    answer.close()
        except TimeoutError:
            raise ReplicaLostError("its events stopped") from None
        finally:
            state.lose_events()
