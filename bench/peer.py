"""Runs Quire's benchmark cases on another engine, into records of the same form.

`vs_vllm.py` and `vs_sglang.py` build and call such an engine. The script needs Quire's modules of
cases and records, not its engine. So `PYTHONPATH=src` in the other engine's environment is enough.
See vs_vllm.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire.errors import ConfigError, QuireError
from quire.tools.bench import startup
from quire.tools.bench.cases import NAMED, Workload, check_lengths, parse_case
from quire.tools.bench.gpu_meter import GpuMeter, Metrics
from quire.tools.bench.record import append_jsonl, format_table, make_record
from quire.tools.bench.throughput import measure

_STARTED = time.monotonic()

STARTUP = "startup"
TIMEOUT = 1200.0
"""Seconds that one start may take."""


class PeerEngine(Protocol):
    """Another engine behind the interface that `measure` drives."""

    vocab_size: int
    max_model_len: int

    def prepare(self, work: Workload) -> Callable[[], object]: ...

    def account(self, began: float, seconds: float) -> Metrics: ...


@dataclass(frozen=True)
class Peer:
    """Another engine.

    Attributes:
        name: as people write it.
        package: name of the package, to install and to import.
        keywords: the class that takes `--engine-args`.
        script: the script that runs the engine.
        settings: returns the engine's settings for options of the command line.
        build: makes the engine.
    """

    name: str
    package: str
    keywords: str
    script: Path
    settings: Callable[[argparse.Namespace], dict[str, Any]]
    build: Callable[[str, dict[str, Any]], PeerEngine]

    def all_settings(self, options: argparse.Namespace) -> dict[str, Any]:
        return {**self.settings(options), **options.engine_args}


def parse(peer: Peer, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Runs Quire's benchmark cases on an installed {peer.name}."
    )
    parser.add_argument("model", help="a folder with a config.json, or a hub id")
    parser.add_argument(
        "--case",
        action="append",
        help=f"{', '.join(NAMED)}, {STARTUP} or ROWSxINxOUT (repeatable); default: b1 and b64",
    )
    parser.add_argument("--repeat", type=int, default=2, help="runs per case; the best counts")
    parser.add_argument("--output", type=Path, help="append the records to this JSONL file")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--engine-args", type=_object, default={}, help=f"more keywords of {peer.keywords}, as JSON"
    )
    parser.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def first_token(peer: Peer, options: argparse.Namespace) -> None:
    """Runs a start: one token, and the moments on the way to it as JSON."""
    importlib.import_module(peer.package)
    imported = time.monotonic()
    engine = peer.build(options.model, peer.all_settings(options))
    built = time.monotonic()
    engine.prepare(Workload([list(range(1, 17))], [1], {"temperature": 0.0}))()
    ended = time.monotonic()
    moments = {"started": _STARTED, "imported": imported, "built": built, "first_token": ended}
    print(json.dumps({**moments, "seconds": {}, "device": "cuda"}), flush=True)


def measure_start(peer: Peer, arguments: list[str], repeat: int) -> Metrics:
    command = [sys.executable, str(peer.script), *arguments, "--first-token"]
    metrics = startup.measure(command, cold=False, repeat=repeat, timeout=TIMEOUT)
    del metrics["device"]
    return metrics


def run(peer: Peer, options: argparse.Namespace, arguments: list[str], version: str) -> None:
    names: list[str] = options.case or ["b1", "b64"]
    cases = [parse_case(name) for name in names if name != STARTUP]
    records = []

    def add(name: str, metrics: Metrics) -> None:
        model = options.model.rstrip("/").rpartition("/")[2]
        about = {**peer.all_settings(options), "engine": peer.package, "repeat": options.repeat}
        record = make_record(name, metrics, model=model, device="cuda", settings=about)
        record.versions[peer.package] = version
        records.append(record)
        if options.output:
            append_jsonl(options.output, [record])

    if STARTUP in names:
        # First: an engine in this process would leave no memory for another one.
        print(f"running {STARTUP} ...", file=sys.stderr)
        add(STARTUP, measure_start(peer, arguments, options.repeat))
    if cases:
        engine = peer.build(options.model, peer.all_settings(options))
        check_lengths(cases, engine.max_model_len)
    meter = GpuMeter.of_device("cuda")
    for case in cases:
        print(f"running {case.name} ...", file=sys.stderr)
        add(case.name, measure(engine, case, repeat=options.repeat, meter=meter))
    print(format_table(records))


def main(peer: Peer, arguments: list[str] | None = None) -> int:
    """Runs the cases of the command line. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(peer, arguments)
    try:
        version = importlib.metadata.version(peer.package)
        if options.first_token:
            first_token(peer, options)
        else:
            run(peer, options, arguments, version)
    except importlib.metadata.PackageNotFoundError:
        print(
            f"{peer.script.stem}: {peer.name} is not installed here: pip install {peer.package}",
            file=sys.stderr,
        )
        return 2
    except QuireError as error:
        print(f"{peer.script.stem}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
