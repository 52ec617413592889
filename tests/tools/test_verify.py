"""`quire verify` on a server with known faults."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from quire.cli.main import app
from quire.errors import ConfigError
from quire.http_client import HttpClient
from quire.tools.verify.checks import CHECKS
from quire.tools.verify.run import ScoreCard, verify
from tests.tools.fake_server import KEY, serve

NAMES = [check.name for check in CHECKS]


def checked(*faults: str, refused: tuple[str, ...] = ()) -> ScoreCard:
    with serve(*faults, refused=refused) as server:
        return verify(HttpClient(server.url, timeout=30))


def names(card: ScoreCard, status: str) -> set[str]:
    return {outcome.check for outcome in card.outcomes if outcome.status == status}


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_a_right_server_passes_all() -> None:
    card = checked()
    assert [outcome.detail for outcome in card.outcomes if outcome.status != "passed"] == []
    assert {outcome.route for outcome in card.outcomes} == {"chat", "completions"}
    assert names(card, "passed") == set(NAMES)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("seed", "same seed, same tokens"),
        ("one sample", "other seeds, other tokens"),
        ("stream", "stream equals whole"),
        ("stream end", "stream equals whole"),
        ("stream usage", "stream equals whole"),
        ("no stream usage", "stream equals whole"),
        ("schema", "JSON schema enforced"),
        ("stop", "stop strings cut exactly"),
        ("stop kept", "stop strings cut exactly"),
        ("stop reason", "stop strings cut exactly"),
        ("order", "log-probabilities consistent"),
        ("not the top", "log-probabilities consistent"),
        ("mass", "log-probabilities consistent"),
        ("few logprobs", "log-probabilities consistent"),
        ("total", "usage adds up"),
        ("one choice", "n choices"),
        ("any model", "unknown model is 404"),
        ("any parameter", "bad parameter is 400"),
        ("422", "bad parameter is 400"),
    ],
)
def test_a_fault_fails_its_check(fault: str, check: str) -> None:
    failed = names(checked(fault), "failed")
    assert check in failed
    # A truncated stream also fails the check that compares stopped streams.
    assert failed - {check} <= ({"stop strings cut exactly"} if fault == "stream" else set())


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("greedy", {"greedy twice the same", "stream equals whole", "stop strings cut exactly"}),
        ("max_tokens", {"max_tokens respected", "usage adds up", "n choices"}),
        ("silent errors", {"unknown model is 404", "bad parameter is 400"}),
        ("no done", {"stream equals whole", "stop strings cut exactly", "n choices"}),
        ("endless", {"stream equals whole", "stop strings cut exactly", "n choices"}),
        ("usage list", {"greedy twice the same", "usage adds up"}),
        ("nested", {"greedy twice the same", "usage adds up"}),
    ],
)
def test_a_fault_may_fail_several_checks(fault: str, checks: set[str]) -> None:
    assert checks <= names(checked(fault), "failed")


@pytest.mark.parametrize(
    ("field", "check"),
    [
        ("seed", "same seed, same tokens"),
        ("response_format", "JSON schema enforced"),
        ("stop", "stop strings cut exactly"),
        ("logprobs", "log-probabilities consistent"),
        ("n", "n choices"),
        ("stream", "stream equals whole"),
    ],
)
def test_a_refused_field_is_not_offered(field: str, check: str) -> None:
    card = checked(refused=(field,))
    assert check in names(card, "not offered")
    # Checks that also use streams fail without them.
    others = {"stop strings cut exactly", "n choices"} if field == "stream" else set()
    assert names(card, "failed") == others


def test_usage_of_streams_may_be_missing() -> None:
    card = checked(refused=("stream_options",))
    assert card.count("failed") == card.count("not offered") == 0


def test_the_newer_name_of_the_limit() -> None:
    card = checked(refused=("max_tokens",))
    assert card.count("failed") == card.count("not offered") == 0


def test_a_missing_route_is_not_offered() -> None:
    card = checked(refused=("/v1/completions",))
    found = {outcome.route: set[str]() for outcome in card.outcomes}
    for outcome in card.outcomes:
        found[outcome.route].add(outcome.status)
    assert found == {"chat": {"passed"}, "completions": {"not offered"}}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no models", "names no model; give --model"),
        ("no JSON", "names no model"),
        ("key", "401: wrong key"),
        ("down", "500: down"),
    ],
)
def test_impossible_checks_are_refused(fault: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(fault)


def test_streams_that_end_differently_are_reported() -> None:
    card = checked("stream end")
    details = [outcome.detail for outcome in card.outcomes if outcome.status == "failed"]
    assert details[0] == (
        "the whole and the streamed answer differ in finish_reason: 'length' and 'stop'"
    )


def test_command() -> None:
    with serve() as server:
        done = command(server.url)
        assert done.exit_code == 0
        assert done.output.splitlines()[-1] == "23 passed, 0 failed, 0 not offered"
        # Without a terminal each check is a line.
        assert done.stderr.splitlines()[0] == "chat: greedy twice the same: passed"
        assert len(done.stderr.splitlines()) == 23
    with serve("total", refused=("seed",)) as server:
        done = command(server.url)
    assert done.exit_code == 1
    assert "17 passed, 2 failed, 4 not offered" in done.output
    assert "failed: chat, usage adds up: " in done.output


def test_command_in_json() -> None:
    with serve("key", "total") as server:
        done = command(server.url, "--json", "--api-key", KEY, "--timeout", "30")
    card = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (card["model"], card["passed"], card["failed"]) == ("fake", 21, 2)
    assert card["checks"][0] == {
        "check": "greedy twice the same",
        "route": "chat",
        "status": "passed",
        "detail": "48 tokens",
    }


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:9"])
def test_command_without_a_server(url: str) -> None:
    done = command(url)
    assert isinstance(done.exception, ConfigError)  # status 2, in `main`
