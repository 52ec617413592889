"""`quire generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from contextlib import closing

import typer
from rich.console import Console

from quire.cli.backend import EngineBackend
from quire.cli.progress import progress_bar
from quire.cli.settings import SamplingArgs
from quire.cli.word_wrap import WordWrap
from quire.config import EngineArgs


def generate(prompt: str, engine: EngineArgs, sampling: SamplingArgs, *, as_chat: bool) -> None:
    """Prints the answer to standard output as it comes; Ctrl-C stops it."""
    if prompt == "-":
        prompt = sys.stdin.read()
    with progress_bar(Console(stderr=True)) as on_progress:
        backend = EngineBackend(engine, on_progress)
    with closing(backend):
        messages = [{"role": "user", "content": prompt}]
        given = sampling.given()
        answer = backend.chat(messages, given) if as_chat else backend.complete(prompt, given)
        screen = Console()
        wrap = WordWrap(screen.width if screen.is_terminal else None)
        try:
            for piece in answer:
                typer.echo(wrap.add(piece), nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            answer.close()
            typer.echo(wrap.end())
