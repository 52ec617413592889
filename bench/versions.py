"""Compares Gluon kernels under two versions of Triton on one GPU.

    python bench/versions.py check                             # kernels against their twins
    python bench/versions.py time --output new.json            # the recorded cases
    python bench/versions.py table old.json new.json           # old, new, and how they differ

`PYTHONPATH` chooses the version: the Triton that Python finds first. `time` takes `--part`
(repeatable), to stay within a limit on a command's time. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from quire import LLM
from quire.tools.bench.cases import parse_case
from quire.tools.bench.throughput import QuireEngine
from quire.tools.bench.throughput import measure as run_case

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

CHECKS = (
    "experts_ring", "gated_delta", "narrow_products", "prefill_attention", "quantized_products",
)  # fmt: skip
"""Tests under tests/gpu that launch every kernel in Gluon."""
PARTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "8b": ("qwen3-8b", {}, ("ttft",)),
    "8b-int4": ("qwen3-8b", {"quantization": "int4"}, ("b64",)),
    "0.6b": ("qwen3-0.6b", {}, ("ttft", "nano", "b64", "b1")),
}
"""By name: the folder under bench/configs, settings, and cases, see `quire.tools.bench.cases`."""


def check() -> int:
    """Runs the tests and returns pytest's exit status."""
    files = [str(HERE.parent / "tests" / "gpu" / f"test_{name}.py") for name in CHECKS]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rs", *files]))


def measure(part: str, output: Path) -> None:
    """Adds a part's figures to those of the same Triton in a file."""
    known = json.loads(output.read_text()) if output.exists() else {"figures": {}}
    pair = f"torch {torch.__version__}, Triton {triton.__version__}"
    if known.setdefault("pair", pair) != pair:
        raise SystemExit(f"{output} is of {known['pair']}, and this is {pair}")
    known["card"] = torch.cuda.get_device_name(0)
    folder, settings, cases = PARTS[part]
    began = time.perf_counter()
    llm = LLM(
        str(HERE / "configs" / folder), load_format="dummy", skip_tokenizer_init=True,
        enable_prefix_caching=False, dtype="bfloat16", **settings,
    )  # fmt: skip
    print(f"{part}: started in {time.perf_counter() - began:.0f} s", flush=True)
    engine = QuireEngine(llm, None)
    for case in cases:
        metrics = run_case(engine, parse_case(case))
        own = {name: value for name, value in metrics.items() if name.startswith("ttft")}
        if case != "ttft":
            own = {case: metrics["output_tok_s"]}
        known["figures"] |= {f"{part} {name}": value for name, value in own.items()}
        output.write_text(json.dumps(known, indent=1))
        print(part, own, flush=True)
    llm.shutdown()


def table(old: Path, new: Path) -> str:
    """Returns figures side by side. Of `ttft` less is better, of the others more."""
    before, after = (json.loads(file.read_text()) for file in (old, new))
    lines = [
        f"| {after['card']} | {before['pair']} | {after['pair']} | faster by |",
        "| --- | --- | --- | --- |",
    ]
    for name, value in before["figures"].items():
        if name in after["figures"]:
            other = after["figures"][name]
            ratio = value / other if "ttft" in name else other / value
            lines.append(f"| {name} | {value:.5g} | {other:.5g} | {100 * (ratio - 1):+.1f} % |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    timing = commands.add_parser("time")
    timing.add_argument("--part", action="append", choices=PARTS)
    timing.add_argument("--output", type=Path, required=True)
    comparing = commands.add_parser("table")
    comparing.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.command == "check":
        return check()
    if options.command == "time":
        parts = options.part or list(PARTS)
        if len(parts) > 1:
            # A process each: a model's memory is free when its process has ended.
            for part in parts:
                own = [sys.executable, __file__, "time", "--output", str(options.output)]
                subprocess.run([*own, "--part", part], check=True)
        else:
            measure(parts[0], options.output)
    else:
        print(table(*options.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
