"""`quire chat`, a conversation in the terminal, and `quire generate`, one answer."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from quire.cli.backend import ChatBackend, EngineBackend, Messages, ServerBackend
from quire.cli.progress import progress_bar
from quire.cli.settings import SamplingArgs, with_settings
from quire.cli.word_wrap import WordWrap
from quire.config import EngineArgs
from quire.errors import EngineDeadError, QuireError

HELP = """\
/reset   forget the conversation
/help    show this
/exit    leave (or Ctrl-D)
Ctrl-C   stop the answer"""


@with_settings(EngineArgs, SamplingArgs)
def chat(
    *,
    engine: EngineArgs,
    sampling: SamplingArgs,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", "--base-url", help="Talk to a running server instead of loading a model."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of that server.", envvar="QUIRE_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
) -> None:
    """Runs until /exit or the end of input."""
    console = Console(highlight=False)
    backend: ChatBackend
    if url is not None:
        backend = ServerBackend(url, api_key)
    else:
        with progress_bar(console) as on_progress:
            backend = EngineBackend(engine, on_progress)
    with closing(backend):
        Conversation(console, backend, sampling, system).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(
        self, console: Console, backend: ChatBackend, sampling: SamplingArgs, system: str | None
    ) -> None:
        self.console = console
        self.backend = backend
        self.sampling = sampling.given()
        self.opening: Messages = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            # It gives `input` line editing and a history. Some builds of Python have none.
            import readline  # noqa: F401
        self.console.print(
            f"[bold]{self.backend.model}[/bold]  [dim]/help shows the commands[/dim]"
        )
        while True:
            try:
                line = self._read()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print("\n[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if not line:
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            else:
                self._answer(line)

    def _read(self) -> str:
        """Reads a line; no prompt is shown where the input is a pipe."""
        if not sys.stdin.isatty():
            return input().strip()
        return self.console.input("[bold cyan]›[/bold cyan] ").strip()

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self.opening)
            self.console.print("[dim]forgotten[/dim]")
        elif line == "/help":
            self.console.print(HELP, markup=False)
        else:
            self.console.print(f"unknown command {line}; /help shows them", markup=False)

    def _answer(self, line: str) -> None:
        """Streams one answer. After Ctrl-C the text so far stays in the conversation."""
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        wrap = WordWrap(self.console.width if self.console.is_terminal else None)
        try:
            try:
                with closing(self.backend.chat(self.messages, self.sampling)) as answer:
                    for piece in answer:
                        pieces.append(piece)
                        self._show(wrap.add(piece))
            finally:
                self._show(wrap.end())
        except KeyboardInterrupt:
            self.console.print(" [dim]stopped[/dim]", end="")
        except EngineDeadError:
            raise
        except QuireError as error:
            self.messages.pop()
            self.console.print(f"[red]{escape(str(error))}[/red] [dim]/reset starts anew[/dim]")
            return
        self.console.print()
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    def _show(self, text: str) -> None:
        # A `Text`, because a plain string's ":name:" would become an emoji.
        self.console.print(Text(text), end="", soft_wrap=True)
        self.console.file.flush()


@with_settings(EngineArgs, SamplingArgs, positional=False)
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")
    ],
    *,
    engine: EngineArgs,
    sampling: SamplingArgs,
    as_chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
) -> None:
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
