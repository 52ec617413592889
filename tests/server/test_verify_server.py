"""`quire verify` on this server."""

from __future__ import annotations

from quire.http_client import HttpClient
from quire.tools.verify.run import verify
from tests.server.server_process import WAIT, Server


def test_all_checks_pass(server: Server) -> None:
    card = verify(HttpClient(server.url, timeout=WAIT))
    assert [outcome for outcome in card.outcomes if outcome.status != "passed"] == []
