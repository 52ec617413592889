"""`quire run-batch`: a file of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from quire.cli.progress import TimeLeft, counted, progress_bar
from quire.cli.settings import with_settings
from quire.config import EngineArgs
from quire.engine.process.client import EngineClient
from quire.server.apis.batch.run import Batch, Counts
from quire.server.app import build_app
from quire.server.args import ApiArgs, ServerArgs

_FAILED, _STOPPED = 1, 130


@with_settings(EngineArgs, ApiArgs, positional=False)
def run_batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object per line.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT", help="Answers. A request whose answer is in it is not run again."
        ),
    ],
    *,
    engine: EngineArgs,
    api: ApiArgs,
    error_file: Annotated[
        Path | None,
        typer.Option("--error-file", "-o", help="Failures go here instead of to OUTPUT."),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Requests in progress at once. Default: 2 x --max-num-seqs."
        ),
    ] = None,
) -> None:
    """Runs the lines that have no outcome yet.

    The exit status is 0 if every line has an answer, 1 if a line failed, 130 after Ctrl-C.
    """
    batch = Batch(source=source, target=target, errors=error_file)
    batch.check()
    console = Console(stderr=True)
    try:
        with asyncio.Runner() as runner:
            counts = runner.run(_run(engine, api, batch, max_concurrency, console))
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on where this one was", err=True)
        raise typer.Exit(_STOPPED) from None
    earlier = f", {counts.before} of them earlier" if counts.before else ""
    typer.echo(f"{counted(counts.done, 'line')} done{earlier}; {counts.failed} failed", err=True)
    if counts.failed:
        raise typer.Exit(_FAILED)


async def _run(
    engine: EngineArgs, api: ApiArgs, batch: Batch, concurrency: int | None, console: Console
) -> Counts:
    with progress_bar(console) as on_progress:
        client = await EngineClient.launch(engine, on_progress)
    try:
        # Nobody fetches a response from here later.
        app = build_app(client, ServerArgs(**vars(api), response_store_size=0))
        # As many wait as run, so that the engine never waits for this process.
        most = concurrency or 2 * client.config.scheduler.max_num_seqs
        batch = replace(batch, concurrency=most, max_body=api.max_body_bytes)
        with _bar(console) as on_count:
            return await batch.run(app, on_count)
    finally:
        await client.shutdown()


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[Counts], None]]:
    """Shows a bar on a terminal, and elsewhere a line for every tenth of the requests."""
    if not console.is_terminal:
        yield _lines()
        return
    progress = Progress(
        TextColumn("Requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
    )
    task = progress.add_task("", total=None, failed=0, left="")
    left = TimeLeft()
    with progress:
        yield lambda counts: progress.update(
            task,
            completed=counts.done,
            total=counts.total,
            failed=counts.failed,
            left=left.estimate(counts.done - counts.before, counts.total - counts.before),
        )


def _lines() -> Callable[[Counts], None]:
    left, shown = TimeLeft(), 0

    def on_count(counts: Counts) -> None:
        nonlocal shown
        total = counts.total - counts.before
        done = counts.done - counts.before
        tenth = 10 * done // max(1, total)
        if tenth > shown:
            shown = tenth
            typer.echo(f"{left.text(done, total)}, {counts.failed} failed", err=True)

    return on_count
