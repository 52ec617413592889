"""`quire`: the commands, and how they fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from quire import __version__
from quire.cli.bench_commands import app as bench
from quire.cli.eval_commands import app as evaluate
from quire.cli.help import CommandGroup, SettingsCommand, with_options
from quire.cli.route_options import RouteOptions
from quire.cli.settings import SamplingArgs, with_settings
from quire.config import EngineArgs
from quire.errors import ConfigError, EngineDeadError, ModelError, QuireError, RequestError
from quire.server.args import ApiArgs, ServerArgs

Dtype = Literal["auto", "float32", "float16", "bfloat16"]

app = typer.Typer(
    name="quire",
    cls=CommandGroup,
    help="Serve large language models. MODEL is a folder or a hub id; without one, every command "
    "uses the small model that ships with Quire.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")


def main() -> None:
    """Entry point. A user's mistake is one line and status 2, never a traceback."""
    try:
        app()
    except (ConfigError, ModelError, RequestError) as error:
        typer.echo(f"quire: {_one_line(error)}", err=True)
        sys.exit(2)
    # Of the system's errors, those of files: a full disk, or a folder of another user's.
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


@app.command(cls=SettingsCommand)
@with_settings(EngineArgs, ServerArgs)
def serve(*, engine: EngineArgs, server: ServerArgs) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from quire.cli.serve import serve as run

    run(engine, server)


@app.command(cls=SettingsCommand)
@with_options(RouteOptions)
def route(*, options: RouteOptions) -> None:
    """Spread requests over several servers of one model."""
    from quire.cli.route import route as run

    run(options)


@app.command(cls=SettingsCommand)
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
    """Chat with a model in the terminal."""
    from quire.cli.chat import chat as run

    run(engine, sampling, url=url, api_key=api_key, system=system)


@app.command(cls=SettingsCommand)
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
    """Complete one prompt, and print the answer as it comes."""
    from quire.cli.chat import generate as run

    run(prompt, engine, sampling, as_chat=as_chat)


@app.command("run-batch", cls=SettingsCommand)
@with_settings(EngineArgs, ApiArgs, positional=False)
def run_batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object per line.")
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="Outcomes; what it holds already is not run again."),
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
            min=1, max=100_000, help="Requests under way at once. Default: 2 x --max-num-seqs."
        ),
    ] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Run it again to go on after a kill."""
    from quire.cli.run_batch import run_batch as run
    from quire.server.apis.batch.run import Batch

    batch = Batch(source=source, target=target, errors=error_file)
    run(engine, api, batch, max_concurrency)


@app.command(cls=SettingsCommand)
def quantize(
    model: Annotated[
        str | None,
        typer.Argument(help="Model folder or hub id, in 16 or 32 bits.", show_default=False),
    ] = None,
    *,
    method: Annotated[
        str,
        typer.Option(
            help="gptq, awq or rtn (to the nearest): integers of 4 or 8 bits in groups. "
            "smoothquant, int8: 8 bits, inputs of layers too. fp8: 8-bit floats, inputs too."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    bits: Annotated[
        int | None, typer.Option(help="4 (default) or 8, of gptq, awq and rtn.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale; -1: all. Default: the largest of 128, 64, 32 and 16 "
            "that divides all layers. fp8: the side of a square block, by default a scale for each "
            "output."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without a zero for each group, or with one. Default: symmetric; awq has zeros.",
            show_default=False,
        ),
    ] = None,
    weight_only: Annotated[
        bool, typer.Option("--weight-only", help="int8 and fp8: leave inputs of layers alone.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate with. Default: one that is built in."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences to calibrate with. Default: 128; for fp8, int8 and rtn 32.",
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to leave as it is, by name, or re:PATTERN. May be repeated."),
    ] = None,
    gate: Annotated[
        float, typer.Option(help="Most percent that perplexity may rise; else nothing is written.")
    ] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Write it whatever it lost.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None,
) -> None:
    """Make a quantized checkpoint, and say what it lost. Run it again to go on after a kill."""
    from quire.cli.quantize import quantize as run
    from quire.tools.quantize import Options, Recipe

    recipe = Recipe.of(
        method, bits=bits, group_size=group_size, symmetric=symmetric, weight_only=weight_only
    )
    options = Options(
        data=data, samples=samples, length=length, ignore=tuple(ignore or ()), gate=gate,
        force=force, device=device,
    )  # fmt: skip
    run(model, revision, out, recipe, options)


@app.command(cls=SettingsCommand)
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model's folder to look at, too.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with this machine, and what to do about it."""
    from quire.cli.doctor import doctor as run

    run(model, host=host, port=port, as_json=json)


@app.command(cls=SettingsCommand)
def verify(
    url: Annotated[str, typer.Argument(help="The server's address, as in localhost:8000.")],
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of that server.", envvar="QUIRE_API_KEY")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that an answer, or a part of it, may take.")
    ] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether any server with OpenAI's API answers as it should, and print a score card.

    Exit status: 0 if no check failed, 1 if one did, 2 if they could not be made. What the server
    does not take is "not offered", which is no failure.
    """
    from quire.cli.verify import verify as run

    run(url, model=model, api_key=api_key, timeout=timeout, as_json=json)


@app.command(cls=SettingsCommand)
def roofline(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id.", show_default=False)
    ] = None,
    *,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="b1, b64, nano, ttft, or requests x prompt x output tokens, as in 64x512x1024. "
            "May be repeated. Default: b1, b64 and ttft."
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="h200, h100, b200, a100, l40s, l4, or cpu: this machine's, whose ceilings are "
            "measured. Default: h200; with --device cpu, cpu.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run",
            help="Then run the cases here, with random weights where there is no checkpoint, and "
            "show by how much the prediction is off. Default: where the GPU is the card.",
            show_default=False,
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Run, and compare the times of kinds of kernels as well."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Dtype, typer.Option(help="auto (the checkpoint's), float32, float16 or bfloat16.")
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="As of quire serve. Default: as the checkpoint.")
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "--tp", min=1, help="GPUs that share each layer."),
    ] = 1,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict times and memory of a model on a card, from its shapes; then run, and compare."""
    from quire.cli.roofline import roofline as predict

    engine = EngineArgs.from_kwargs(
        model=model, revision=revision, dtype=dtype, device="cpu", quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    predict(engine, card, case, device=device, run=run, kernels=kernels, as_json=json)


@app.command(cls=SettingsCommand)
def tune(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id.", show_default=False)
    ] = None,
    *,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=256,
            show_default=False,
            help="Rows of a step, rounded up to a power of two. May be repeated. Default: 1, 2, 4 "
            "and so on up to 256.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure also what tables have entries of.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    dtype: Annotated[
        Dtype, typer.Option(help="auto (the checkpoint's), float32, float16 or bfloat16.")
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="As of quire serve. Default: as the checkpoint.")
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            min=1,
            help="GPUs that share each layer: a rank's part is measured, on one.",
        ),
    ] = 1,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None,
) -> None:
    """Measure which kernel and tile runs each of a model's linear layers fastest, and keep it.

    Servers do the same in the background, while they are idle (--tune-tables).
    """
    from quire.cli.tune import tune as run

    engine = EngineArgs.from_kwargs(
        model=model, revision=revision, dtype=dtype, device="cpu", quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    run(engine, device=device, rows=rows, again=again)


@app.command(cls=SettingsCommand)
@with_settings(EngineArgs)
def info(
    *,
    engine: EngineArgs,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices, and what a model would run with."""
    from quire.cli.info import info as run

    run(engine, as_json=json)


@app.command(cls=SettingsCommand)
@with_settings(EngineArgs)
def profile(
    *,
    engine: EngineArgs,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Profile decode steps of so many requests (repeatable). Default: 1 and 8, unless "
            "there are cases.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens before those.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to profile.")] = 50,
    case: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Profile a whole case of quire bench throughput, prompts included (repeatable).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile for https://ui.perfetto.dev, too."),
    ] = None,
    nvtx: Annotated[
        bool,
        typer.Option("--nvtx", help="Only name steps and layers, for nsys to profile the command."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append records to this file, one JSON object a line."),
    ] = None,
) -> None:
    """Profile a workload: time by kernel, gaps, and how much of the device it uses."""
    from quire.cli.profile import profile as run

    run(
        engine, rows=rows or ([] if case else [1, 8]), prompt_tokens=prompt_tokens, steps=steps,
        cases=case or [], trace=trace, nvtx=nvtx, as_json=json, output=output,
    )  # fmt: skip


@app.command(cls=SettingsCommand)
@with_settings(EngineArgs, positional=False)
def trace(
    output: Annotated[
        Path, typer.Argument(metavar="OUT.json", help="The trace, for https://ui.perfetto.dev.")
    ],
    *,
    engine: EngineArgs,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests to run.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of each.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 32,
) -> None:
    """Run a small workload and write a trace of every step (a server does it with --trace-dir)."""
    from quire.cli.profile import trace as run

    run(output, engine, requests, prompt_tokens, output_tokens)


@app.command(cls=SettingsCommand)
def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Requests, in Mooncake's or Qwen's format."),
    ] = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="Replicas.")] = 4,
    prefill_nodes: Annotated[
        int, typer.Option(min=0, help="How many of them compute prompts for the others.")
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="As of quire route; may be repeated. Default: each of them."),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="What an engine takes, as --calibrate wrote it."),
    ] = None,
    speed: Annotated[float, typer.Option(help="How often faster requests come.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="The first so many. Default: all.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Measure this server, which does nothing else, and write --out."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="QUIRE_REPLICA_KEY", help="Its key, an admin's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV with a line for each policy, or an engine's JSON."),
    ] = None,
) -> None:
    """Run a trace through the router's own code before modelled engines."""
    from quire.cli.simulate import measure
    from quire.cli.simulate import simulate as run

    if calibrate is not None:
        if out is None:
            raise ConfigError("--calibrate needs --out FILE.json", "out")
        measure(calibrate, key=api_key, model=None, out=out)
        return
    if trace is None:
        raise ConfigError("name the requests: --trace FILE.jsonl", "trace")
    run(
        nodes=nodes, prefill_nodes=prefill_nodes, trace=trace,
        policies=policy or ["prefix", "least-loaded", "round-robin"], engine=engine, speed=speed,
        most=requests, out=out,
    )  # fmt: skip
