"""Two GPUs against one: equal tokens, then throughput and time to the first token.

    python bench/kernels/two_gpus.py                  # checks, then Qwen3-8B with random weights
    python bench/kernels/two_gpus.py --only checks    # or cases
    python bench/kernels/two_gpus.py --ranks 2 --case b1 --case ttft   # no run on one GPU
    python bench/kernels/two_gpus.py --only cases --way pipeline --case 128x512x256
    python bench/kernels/two_gpus.py --async-tp       # halves of long steps: checks, times, a table

Checks compare small models in fp32, replayed as graphs, with mixed sampling, penalties, prefix
hits, preemption and a grammar. A close choice may turn, as sums over ranks round otherwise, so nine
in ten completions must be equal. The exit status tells whether all were.

With `--async-tp` two GPUs are compared with themselves: small models' tokens, and Qwen3-8B's times
to the first token, with that setting off, on, chosen by measurement, and off once more.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
MODEL = ROOT / "bench" / "configs" / "qwen3-8b"
CASES = ("b1", "b64", "nano", "ttft")
_LOGGED = """
import logging
from quire.cli.main import main
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("quire.parallel").setLevel(logging.INFO)
main()
"""
"""`quire`, which says what it chose for sums over ranks."""
LIMIT = 400
"""Seconds that one engine's cases may take."""


def completions(
    folder: Path | None, settings: dict[str, Any], longest: int = 90
) -> list[list[int]]:
    """Returns the tokens of the same requests, from an engine of these settings. longest: tokens of
    what prompts do not share."""
    from quire import LLM, SamplingParams
    from tests.gpu.test_graphs import COSTLY, PARAMS

    params = PARAMS + COSTLY
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 20,
        "max_num_batched_tokens": 300,
        "num_kv_blocks": 400,
        **settings,
    }
    if folder is None:
        llm = LLM(**options)
        vocab = llm.config.vocab_size
        ruled = SamplingParams(
            temperature=0.8, seed=9, max_tokens=40, structured_outputs={"regex": r"\d{3}-\d{4}"}
        )
        params = [*params, ruled]
    else:
        llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)
        vocab = 128
    draw = random.Random(0)
    shared = [draw.randrange(6, vocab) for _ in range(longest // 2)]
    prompts = [
        (shared if index % 3 == 0 else [])
        + [draw.randrange(6, vocab) for _ in range(draw.randint(1, longest))]
        for index in range(27)
    ]
    chosen = [params[index % len(params)] for index in range(len(prompts))]
    try:
        outputs = llm.generate(prompts, chosen, use_tqdm=False)  # type: ignore[arg-type]
    finally:
        llm.shutdown()
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def checks() -> bool:
    """Prints how many completions are equal on one and two GPUs; returns whether enough are."""
    from tests.tiny_engine import TINY, TINY_EXPERTS, TINY_WINDOW, model_folder

    tensor, whole = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}
    stages = {"pipeline_parallel_size": 2}
    fine = True
    with tempfile.TemporaryDirectory() as scratch:
        tiny = model_folder(Path(scratch) / "tiny", TINY)
        window = model_folder(Path(scratch) / "window", TINY_WINDOW)
        uneven = model_folder(Path(scratch) / "uneven", {**TINY, "vocab_size": 131})
        experts = model_folder(Path(scratch) / "experts", TINY_EXPERTS)
        for name, folder, settings, two_gpus in (
            ("embedded model, grammar", None, {}, tensor),
            ("qwen3", tiny, {}, tensor),
            ("qwen3, few blocks", tiny, {"num_kv_blocks": 60}, tensor),
            ("qwen3, eager", tiny, {"enforce_eager": True}, tensor),
            ("qwen3, int8", tiny, {"quantization": "int8"}, tensor),
            ("qwen3, KV in fp8", tiny, {"kv_cache_dtype": "fp8_dynamic"}, tensor),
            ("qwen3, vocabulary of 131", uneven, {}, tensor),
            ("mistral, window", window, {"steps_in_flight": 3}, tensor),
            ("experts, whole", experts, {}, tensor | whole),
            ("stages, grammar", None, {}, stages),
            ("stages, few blocks", tiny, {"num_kv_blocks": 60}, stages),
            ("stages, eager, window", window, {"enforce_eager": True}, stages),
        ):
            began = time.monotonic()
            try:
                one, two = (completions(folder, settings | more) for more in ({}, two_gpus))
            except Exception as error:
                fine = False
                print(f"{name:28} failed: {type(error).__name__}: {error}", flush=True)
                continue
            same = sum(a == b for a, b in zip(one, two, strict=True))
            fine &= same >= 0.9 * len(one)
            seconds = time.monotonic() - began
            print(f"{name:28} {same} of {len(one)} equal, {seconds:.1f} s", flush=True)
    return fine


def check_halves() -> bool:
    """Prints how many completions are equal with long steps whole and in halves, on two GPUs;
    returns whether enough are, and all of those that must be."""
    from tests.tiny_engine import TINY, TINY_EXPERTS, TINY_WINDOW, model_folder

    long = {"max_position_embeddings": 4096}
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 4096, "num_kv_blocks": 3000}
    fine = True
    with tempfile.TemporaryDirectory() as scratch:
        tiny = model_folder(Path(scratch) / "tiny", TINY | long)
        window = model_folder(Path(scratch) / "window", TINY_WINDOW | long)
        experts = model_folder(Path(scratch) / "experts", TINY_EXPERTS | long)
        for name, folder, settings in (
            ("qwen3", tiny, {}),
            ("qwen3, eager, few blocks", tiny, {"enforce_eager": True, "num_kv_blocks": 500}),
            ("qwen3, NCCL", tiny, {"disable": ("symmetric",)}),
            ("qwen3, KV in fp8", tiny, {"kv_cache_dtype": "fp8_dynamic"}),
            ("mistral, window", window, {"steps_in_flight": 3}),
            ("experts, whole", experts, {"enable_expert_parallel": True}),
            ("qwen3, deterministic", tiny, {"deterministic": True}),
        ):
            began = time.monotonic()
            try:
                whole, halves = (
                    completions(folder, options | settings | {"async_tp": how}, 1800)
                    for how in ("off", "on")
                )
            except Exception as error:
                fine = False
                print(f"{name:28} failed: {type(error).__name__}: {error}", flush=True)
                continue
            same = sum(a == b for a, b in zip(whole, halves, strict=True))
            # In halves products may be of other tiles, which round otherwise.
            fine &= same >= (1.0 if "deterministic" in settings else 0.8) * len(whole)
            seconds = time.monotonic() - began
            print(f"{name:28} {same} of {len(whole)} equal, {seconds:.1f} s", flush=True)
    return fine


def compare_halves(more: list[str]) -> bool:
    """Prints times to the first token with long steps whole and in halves; returns whether all
    could be measured."""
    found = {
        how: cases(2, "tensor", ["ttft"], ["--async-tp", how.strip("'"), *more])
        for how in ("off", "on", "auto", "off'")
    }
    metrics = {how: by.get("ttft", {}) for how, by in found.items()}
    print(f"{'':16}" + "".join(f"{how:>10}" for how in metrics) + "   off / on")
    for name in metrics["off"]:
        times = [by.get(name, float("nan")) for by in metrics.values()]
        gain = min(times[0], times[3]) / times[1]
        print(f"{name:16}" + "".join(f"{each:10.2f}" for each in times) + f"{gain:11.3f}")
    return all(metrics.values())


def cases(ranks: int, way: str, names: list[str], more: list[str]) -> dict[str, dict[str, float]]:
    """Returns the metrics of a model's cases by name, from an engine in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        records = Path(scratch) / "records.jsonl"
        command = [
            sys.executable, "-c", _LOGGED, "bench", "throughput", str(MODEL),
            "--load-format", "dummy", "--skip-tokenizer-init", "--output", str(records),
            f"--{way}-parallel-size", str(ranks), *(f"--case={name}" for name in names), *more,
        ]  # fmt: skip
        began = time.monotonic()
        try:
            status = subprocess.run(command, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            status = -1
        print(f"{ranks} ranks: status {status}, {time.monotonic() - began:.0f} s", flush=True)
        lines = records.read_text().splitlines() if records.exists() else []
    return {line["case"]: line["metrics"] for line in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("checks", "cases"))
    parser.add_argument("--case", action="append", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--ranks", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--way", choices=("tensor", "pipeline"), default="tensor")
    parser.add_argument("--async-tp", action="store_true")
    arguments, more = parser.parse_known_args()
    fine = True
    if arguments.async_tp:
        fine = arguments.only == "cases" or check_halves()
        if arguments.only != "checks":
            fine &= compare_halves(more)
        return 0 if fine else 1
    if arguments.only != "cases":
        fine = checks()
    if arguments.only != "checks":
        names = arguments.case or list(CASES)
        found = {
            ranks: cases(ranks, arguments.way, names, more) for ranks in arguments.ranks or (1, 2)
        }
        rows = sorted({(case, name) for by in found.values() for case in by for name in by[case]})
        print("case   metric                          " + "".join(f"{r:>12}" for r in found))
        for case, name in rows:
            values = [by.get(case, {}).get(name) for by in found.values()]
            shown = "".join(f"{'-' if v is None else format(v, '.1f'):>12}" for v in values)
            print(f"{case:6} {name:32}{shown}")
        fine &= all(set(by) == set(names) for by in found.values())
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
