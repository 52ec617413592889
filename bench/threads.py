"""Threads of the engine's process on a CPU: what a thread count and a way of waiting cost.

    python bench/threads.py --output bench/results/threads.jsonl

Every variant is a process of its own with its own environment. They take turns, so that a busy
machine is as busy for all of them; only ratios to the first variant are recorded. "alone" is the
best of the rounds with no load of ours; "shared" is the median of rounds beside as many busy
processes as there are cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from quire.engine.processes import thread_variables
from quire.tools.bench.record import append_jsonl, make_record

CONFIGS = Path(__file__).resolve().parent / "configs"
ROWS, PROMPT = 4, 32
CASES = {"quire-tiny": (None, 6), "gpt2": (str(CONFIGS / "gpt2"), 1)}
"""Model by name: its folder (None: the embedded one) and the tokens that a round generates."""


def variants() -> dict[str, dict[str, str]]:
    """Environments by name; the first is PyTorch's own choice."""
    return {
        "torch": {},
        "one thread": {"OMP_NUM_THREADS": "1"},
        "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
        "quire": thread_variables({}),
    }


def work(folder: str | None, tokens: int) -> None:
    """Runs a round for each line of standard input, and prints its seconds."""
    # The parent process starts the variants and needs no engine.
    from quire import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="auto" if folder is None else "dummy",
        skip_tokenizer_init=True,
        device="cpu",
        kv_cache_gb=0.1,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(1, PROMPT + 1))}] * ROWS
    llm.generate(prompts, params, use_tqdm=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - began, flush=True)


class Worker:
    """A process that runs rounds when asked."""

    def __init__(self, name: str, variables: dict[str, str]) -> None:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", name],
            env={**plain, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def round(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(name: str, rounds: int) -> dict[str, float]:
    """Returns each variant's speed relative to the first's, alone and shared."""
    workers = {kind: Worker(name, variables) for kind, variables in variants().items()}
    seconds: dict[tuple[str, str], list[float]] = {}
    try:
        for load in ("alone", "shared"):
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range((os.cpu_count() or 1) if load == "shared" else 0)
            ]
            try:
                for _ in range(rounds):
                    for kind, worker in workers.items():
                        seconds.setdefault((load, kind), []).append(worker.round())
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    finally:
        for worker in workers.values():
            worker.close()
    best = {key: (min if key[0] == "alone" else statistics.median)(v) for key, v in seconds.items()}
    return {
        f"{load} {kind}": best[load, "torch"] / value
        for (load, kind), value in best.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(*CASES[options.work])
        return
    for name in CASES:
        ratios = measure(name, options.rounds)
        print(name, {key: round(value, 2) for key, value in ratios.items()})
        if options.output is not None:
            about = {"cores": os.cpu_count(), "rounds": options.rounds, "ratio": "to torch's own"}
            record = make_record("threads", ratios, model=name, device="cpu", settings=about)
            append_jsonl(options.output, [record])


if __name__ == "__main__":
    main()
