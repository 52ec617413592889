"""Runs Quire's benchmark cases on an installed vLLM, into records of the same form.

    python bench/vs_vllm.py bench/configs/qwen3-0.6b --case nano --case b64 --case b1 --case ttft \\
        --output vllm.jsonl

The same prompts (token ids), lengths and sampling as `quire bench throughput`, random weights, no
prefix cache, no tokenizer. `--case startup` times the command to the first token in fresh
processes, as `quire bench startup` does, caches warm. Of Quire it needs the modules of cases and
records, not the engine: `PYTHONPATH=src` in vLLM's environment is enough. See vs_vllm.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench import startup
from quire.bench.cases import NAMED, Workload, check_lengths, parse_case
from quire.bench.record import append_jsonl, format_table, make_record
from quire.bench.throughput import Metrics, measure
from quire.errors import ConfigError, QuireError

_STARTED = time.monotonic()

STARTUP = "startup"
TIMEOUT = 1200.0
"""Seconds that one start may take."""


class VllmEngine:
    """`vllm.LLM` behind the interface that `measure` drives."""

    def __init__(self, model: str, **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, **settings)
        config = self.llm.llm_engine.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.max_model_len: int = config.max_model_len

    def prepare(self, work: Workload) -> Callable[[], object]:
        from vllm import SamplingParams

        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **work.sampling)
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        return lambda: self._run(prompts, params, work)

    def _run(self, prompts: list[Any], params: list[Any], work: Workload) -> None:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != work.lengths:
            raise RuntimeError("vLLM stopped before the lengths that the case asks for")

    def account(self, began: float, seconds: float) -> Metrics:
        return {}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `vllm.LLM`."""
    given: dict[str, Any] = {
        "load_format": options.load_format,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "seed": 0,
    }
    if options.max_model_len is not None:
        given["max_model_len"] = options.max_model_len
    return {**given, **options.engine_args}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
        "--engine-args", type=_object, default={}, help="more keywords of vllm.LLM, as JSON"
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


def first_token(options: argparse.Namespace) -> None:
    """Runs a start: one token, and the moments on the way to it as JSON."""
    import vllm  # noqa: F401

    imported = time.monotonic()
    engine = VllmEngine(options.model, **settings(options))
    built = time.monotonic()
    engine.prepare(Workload([list(range(1, 17))], [1], {"temperature": 0.0}))()
    ended = time.monotonic()
    moments = {"started": _STARTED, "imported": imported, "built": built, "first_token": ended}
    print(json.dumps({**moments, "seconds": {}, "device": "cuda"}), flush=True)


def measure_start(arguments: list[str], repeat: int) -> Metrics:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--first-token"]
    metrics = startup.measure(command, cold=False, repeat=repeat, timeout=TIMEOUT)
    del metrics["device"]
    return metrics


def run(options: argparse.Namespace, arguments: list[str], version: str) -> None:
    names: list[str] = options.case or ["b1", "b64"]
    cases = [parse_case(name) for name in names if name != STARTUP]
    records = []

    def add(name: str, metrics: Metrics) -> None:
        model = options.model.rstrip("/").rpartition("/")[2]
        about = {**settings(options), "engine": "vllm", "repeat": options.repeat}
        record = make_record(name, metrics, model=model, device="cuda", settings=about)
        record.versions["vllm"] = version
        records.append(record)
        if options.output:
            append_jsonl(options.output, [record])

    if STARTUP in names:
        # First: an engine in this process would leave no memory for another one.
        print(f"running {STARTUP} ...", file=sys.stderr)
        add(STARTUP, measure_start(arguments, options.repeat))
    if cases:
        engine = VllmEngine(options.model, **settings(options))
        check_lengths(cases, engine.max_model_len)
    for case in cases:
        print(f"running {case.name} ...", file=sys.stderr)
        add(case.name, measure(engine, case, repeat=options.repeat))
    print(format_table(records))


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    try:
        version = importlib.metadata.version("vllm")
        if options.first_token:
            first_token(options)
        else:
            run(options, arguments, version)
    except importlib.metadata.PackageNotFoundError:
        print("vs_vllm: vLLM is not installed here: pip install vllm", file=sys.stderr)
        return 2
    except QuireError as error:
        print(f"vs_vllm: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
