"""`quire`: the table of commands, and how they fail."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire import __version__
from quire.cli.help import Command, command_group
from quire.errors import ConfigError, EngineDeadError, ModelError, QuireError, RequestError

BENCH = {
    "throughput": Command(
        "quire.cli.bench:throughput",
        "Measure the engine through `LLM.generate`, all requests at once.",
    ),
    "latency": Command(
        "quire.cli.bench:latency",
        "Measure one request at a time: first token, between tokens, whole answer.",
    ),
    "startup": Command(
        "quire.cli.bench:startup",
        "Measure from the command to the first token, in fresh processes.",
    ),
    "ablation": Command(
        "quire.cli.bench:ablation", "Measure what each optimization brings, by switching it off."
    ),
    "scheduler": Command("quire.cli.bench:scheduler", "Measure what a step costs the scheduler."),
    "cache": Command("quire.cli.bench:cache", "Measure what a request costs the prefix cache."),
    "serve": Command("quire.cli.bench_serve:serve", "Load a server, and measure its answers."),
}
EVAL = {
    "perplexity": Command(
        "quire.cli.perplexity:perplexity",
        "Measure a model's perplexity over a text, and its divergence from another model.",
    ),
}
COMMANDS: dict[str, Command | typer.Typer] = {
    "serve": Command("quire.cli.serve:serve", "Serve a model over HTTP with OpenAI's API."),
    "route": Command("quire.cli.route:route", "Spread requests over several servers of one model."),
    "chat": Command("quire.cli.chat:chat", "Chat with a model in the terminal."),
    "generate": Command(
        "quire.cli.chat:generate", "Complete one prompt, and print the answer as it comes."
    ),
    "run-batch": Command(
        "quire.cli.run_batch:run_batch",
        "Answer a file of requests in OpenAI's batch format.",
        "After a kill, run the same command again: it continues with the requests that have no "
        "answer.",
    ),
    "quantize": Command(
        "quire.cli.quantize:quantize",
        "Make a quantized checkpoint, and print how much worse it predicts a text.",
        "After a kill, run the same command again: it continues with the next layer.",
    ),
    "doctor": Command(
        "quire.cli.doctor:doctor", "Say what is wrong with this machine, and how to mend it."
    ),
    "verify": Command(
        "quire.cli.verify:verify",
        "Check whether any server with OpenAI's API answers as it should; print a score card.",
        "Exit status: 0 if no check failed, 1 if one failed, 2 if the checks could not run. "
        'A check of something that the server does not support counts as "not offered", not as '
        "failed.",
    ),
    "roofline": Command(
        "quire.cli.roofline:roofline",
        "Predict a model's times and memory on a card from its shapes; then run, and compare.",
    ),
    "tune": Command(
        "quire.cli.tune:tune",
        "Measure which kernel and tile is fastest for each linear layer of a model; keep the "
        "result.",
        "Servers do the same in the background, while they are idle (--tune-tables).",
    ),
    "info": Command(
        "quire.cli.info:info", "Show versions, devices, and what a model would run with."
    ),
    "profile": Command(
        "quire.cli.profile:profile",
        "Profile a workload: time by kernel, gaps, and how much of the device it uses.",
    ),
    "trace": Command(
        "quire.cli.profile:trace",
        "Run a small workload and write a trace of every step (a server does it with --trace-dir).",
    ),
    "simulate": Command(
        "quire.cli.simulate:simulate",
        "Run a trace through the router's own code, in front of modelled engines.",
    ),
    "bench": command_group("bench", "Measure Quire.", BENCH),
    "eval": command_group("eval", "Measure how good a model is.", EVAL),
}
app = command_group(
    "quire",
    "Serve large language models. MODEL is a folder or a hub id; without one, every command uses "
    "the small model that ships with Quire.",
    COMMANDS,
)


def main() -> None:
    """Entry point. A user's mistake is one line and status 2, never a traceback."""
    try:
        app()
    except (ConfigError, ModelError, RequestError) as error:
        typer.echo(f"quire: {_one_line(error)}", err=True)
        sys.exit(2)
    # An OSError is about a file here: a full disk, or a folder that belongs to another user.
    except (EngineDeadError, QuireError, OSError) as error:
        typer.echo(f"quire: {_one_line(error)}", err=True)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@app.callback(invoke_without_command=True)
def _quire(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
