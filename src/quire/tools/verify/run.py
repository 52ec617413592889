"""Runs all checks on all routes of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.http_client import HttpClient
from quire.tools.verify.checks import CHECKS, Check
from quire.tools.verify.outcome import FailedError, NotOfferedError, Outcome, Status
from quire.tools.verify.routes import CHAT, ROUTES
from quire.tools.verify.session import REFUSED, Session, send
from quire.tools.verify.tool_checks import TOOL_CHECKS
from quire.tools.verify.tool_session import ToolSession

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class ScoreCard:
    """The outcomes of all checks of a server, by route and in the order of `CHECKS`."""

    url: str
    model: str
    outcomes: list[Outcome]

    def count(self, status: Status) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)


def verify(
    client: HttpClient, model: str | None = None, on_outcome: OnOutcome | None = None
) -> ScoreCard:
    """Makes all checks, one request at a time.

    Args:
        model: name of the model; None takes the first one that the server lists.
        on_outcome: called after each check.

    Raises:
        ConfigError: the server cannot be reached, refuses the key, names no model, or has no route
            that answers the simplest request.
    """
    model = model or _first_model(client)
    outcomes: list[Outcome] = []
    refusals = []
    for route in ROUTES:
        session = Session(client, model, route)
        absent = _absence(session)
        refusals += [absent.detail] if absent else []
        for check in CHECKS:
            if check.chat_only and route.name != "chat":
                continue
            outcome = replace(absent, check=check.name) if absent else _outcome(check, session)
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    if len(refusals) == len(ROUTES):
        raise ConfigError("; ".join(refusals), "url")
    return ScoreCard(client.url, model, outcomes)


def verify_tools(
    client: HttpClient, model: str | None = None, on_outcome: OnOutcome | None = None
) -> ScoreCard:
    """Makes all checks of tool calls. Arguments and errors are those of `verify`."""
    model = model or _first_model(client)
    session = Session(client, model, CHAT)
    absent = _absence(session)
    if absent is not None:
        raise ConfigError(absent.detail, "url")
    tools = ToolSession(session)
    outcomes = []
    for check in TOOL_CHECKS:
        status, detail = _result(lambda run=check.run: run(tools))  # type: ignore[misc]
        outcome = Outcome(check.name, CHAT.name, status, detail, check.seen_in)
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    return ScoreCard(client.url, model, outcomes)


def _absence(session: Session) -> Outcome | None:
    """Returns one outcome for all checks of a route if the route cannot be used, else None.

    A route cannot be used if the server does not have it, or if the simplest request fails."""
    try:
        reply = session.probe()
    except FailedError as error:
        raise ConfigError(str(error), "url") from None
    if reply.status == 200:
        return None
    detail = f"{session.route.path} answered {reply}"
    if reply.status in (401, 403):
        raise ConfigError(f"{detail}; see --api-key", "api_key")
    status: Status = "not offered" if reply.status in REFUSED else "failed"
    return Outcome("", session.route.name, status, detail)


def _outcome(check: Check, session: Session) -> Outcome:
    return Outcome(check.name, session.route.name, *_result(lambda: check.run(session)))


def _result(run: Callable[[], str]) -> tuple[Status, str]:
    """Returns the status and the detail of a check."""
    try:
        return "passed", run()
    except FailedError as error:
        return "failed", str(error)
    except NotOfferedError as error:
        return "not offered", str(error)


def _first_model(client: HttpClient) -> str:
    reply = send(client, "GET", "/v1/models")
    if reply.status != 200:
        raise ConfigError(f"/v1/models of {client.address} answered {reply}", "url")
    try:
        return str(reply.body["data"][0]["id"])
    except (LookupError, TypeError):
        raise ConfigError(f"{client.address} names no model; give --model", "model") from None
