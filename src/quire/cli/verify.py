"""`quire verify`: a score card of any server that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.help import AsJson
from quire.errors import ConfigError
from quire.http_client import HttpClient
from quire.tools.verify.outcome import Outcome
from quire.tools.verify.run import OnOutcome, ScoreCard, verify_tools
from quire.tools.verify.run import verify as run_checks


class ReportFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


_STYLES = {"passed": "green", "failed": "bold red", "not offered": "dim"}


def verify(
    url: Annotated[
        str | None, typer.Argument(help="The server's address, as in localhost:8000.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="The server's address, in place of the argument.")
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="Check tool calls instead: bugs of many servers.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of that server.", envvar="QUIRE_API_KEY")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that an answer, or a part of it, may take.")
    ] = 120.0,
    json: AsJson = False,
    format: Annotated[
        ReportFormat, typer.Option(help="table, or json, which --json also gives.")
    ] = ReportFormat.TABLE,
) -> None:
    """Prints the score card. The exit status is 1 if a check failed.

    Raises:
        ConfigError: the checks cannot be made; exit status 2.
    """
    address = base_url or url
    if address is None or (url is not None and base_url not in (None, url)):
        raise ConfigError("give the server's address once, as URL or --base-url", "url")
    client = HttpClient(address, api_key, timeout)
    with _progress(Console(stderr=True)) as on_outcome:
        card = (verify_tools if tools else run_checks)(client, model, on_outcome)
    if json or format is ReportFormat.JSON:
        typer.echo(dumps(described(card), indent=2))
    else:
        _print(card)
    if card.count("failed"):
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[OnOutcome]:
    """Yields a callback for outcomes, which shows the last check, or without a terminal each."""
    if not console.is_terminal:
        yield lambda done: typer.echo(f"{done.route}: {done.check}: {done.status}", err=True)
        return
    with console.status("Checking") as status:
        yield lambda done: status.update(f"{done.route}: {done.check}")


def described(card: ScoreCard) -> dict[str, object]:
    return {
        "url": card.url,
        "model": card.model,
        "passed": card.count("passed"),
        "failed": card.count("failed"),
        "not_offered": card.count("not offered"),
        "checks": [_described(outcome) for outcome in card.outcomes],
    }


def _described(outcome: Outcome) -> dict[str, object]:
    fields = asdict(outcome)
    seen_in = fields.pop("seen_in")
    return {**fields, "seen_in": seen_in} if seen_in else fields


def _print(card: ScoreCard) -> None:
    console = Console(highlight=False)
    table = Table(title=Text(f"{card.model} at {card.url}"), title_justify="left")
    routes = list(dict.fromkeys(outcome.route for outcome in card.outcomes))
    table.add_column("check")
    for route in routes:
        table.add_column(route)
    found = {(outcome.check, outcome.route): outcome.status for outcome in card.outcomes}
    for check in dict.fromkeys(outcome.check for outcome in card.outcomes):
        cells = [found.get((check, route)) for route in routes]
        table.add_row(check, *(Text(cell or "", _STYLES.get(cell or "", "")) for cell in cells))
    console.print(table)
    for outcome in card.outcomes:
        if outcome.status != "passed":
            place = f"{outcome.route}, {outcome.check}"
            seen = f" (seen in {', '.join(outcome.seen_in)})" if outcome.seen_in else ""
            text = Text(f"{outcome.status}: {place}: {outcome.detail}{seen}")
            console.print(text, soft_wrap=True)
    counts = {status: card.count(status) for status in ("passed", "failed", "not offered")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
