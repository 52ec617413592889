"""Compares Quire with llama.cpp on one thread of this machine's CPU, as ratios of one run.

    python bench/cpu_vs_llama_cpp.py MODEL FILE.gguf --peer "PYTHON" [--streams 1,8] [--out FILE]

MODEL is a folder of safetensors and FILE.gguf the same model for llama.cpp. PYTHON is a command
that runs Python with `llama_cpp_py_sync` (and numpy). Its wheel needs glibc 2.38. With an older
system, unpack libc6, libgcc-s1, libgomp1 and libstdc++6 of Debian 13 into a folder L, and give
"L/ld-linux-x86-64.so.2 --library-path L:/usr/lib/x86_64-linux-gnu python3".

Both decode random prompts of 64 tokens greedily. Each engine has a process of its own, and rounds
alternate, so other work slows all of them. A figure is the median over rounds of the median CPU
seconds of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = 64
ENGINES = {
    "llama.cpp": None,
    "Quire int4,head=int8": "int4,head=int8",
    "Quire int8,head=int8": "int8,head=int8",
    "Quire fp32": "",
}
"""Quantization by engine; None: the peer."""


def prompts(streams: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randint(10, 10000) for _ in range(PROMPT)] for _ in range(streams)]


def median_step(step: Callable[[], object], steps: int) -> float:
    """Returns the median CPU seconds of a step, after five to warm up."""
    times = []
    for _ in range(steps + 5):
        begun = time.process_time()
        step()
        times.append(time.process_time() - begun)
    return statistics.median(times[5:])


def peer_step(file: str, streams: int) -> Callable[[], object]:
    """Returns a function that decodes a token of each stream with llama.cpp."""
    import llama_cpp_py_sync
    import numpy as np

    folder = Path(llama_cpp_py_sync.__file__).parent
    for name in ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    from llama_cpp_py_sync import _cffi_bindings as bindings

    ffi, lib = bindings.get_ffi(), bindings.get_lib()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.n_batch = 1024 * streams, streams, 2048
    options.n_threads = options.n_threads_batch = 1
    context = lib.llama_init_from_model(model, options)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(2048, 0, 1)

    def decode(tokens: list[int], positions: list[int], owners: list[int]) -> list[int]:
        """Returns the likeliest next token of each stream's last token."""
        last = [i + 1 == len(owners) or owners[i + 1] != own for i, own in enumerate(owners)]
        batch.n_tokens = len(tokens)
        for i, row in enumerate(zip(tokens, positions, owners, last, strict=True)):
            batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i] = row
            batch.n_seq_id[i] = 1
        if lib.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        found = []
        for i in [i for i, wanted in enumerate(last) if wanted]:
            logits = ffi.buffer(lib.llama_get_logits_ith(context, i), 4 * vocab)
            found.append(int(np.frombuffer(logits, dtype=np.float32).argmax()))
        return found

    state: dict[str, Any] = {"tokens": [], "position": PROMPT}
    for owner, ids in enumerate(prompts(streams)):
        state["tokens"] += decode(ids, list(range(PROMPT)), [owner] * PROMPT)

    def step() -> None:
        owners, position = list(range(streams)), state["position"]
        state["tokens"] = decode(state["tokens"], [position] * streams, owners)
        state["position"] += 1

    return step


def own_step(folder: str, quantization: str, streams: int, steps: int) -> Callable[[], object]:
    """Returns a function that decodes a token of each stream with Quire."""
    from quire import LLM, SamplingParams
    from quire.arrays import int32

    llm = LLM(
        folder,
        device="cpu",
        dtype="float32",
        quantization=quantization or None,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=streams,
        max_num_batched_tokens=1024,
        kv_cache_gb=0.5,
        enable_prefix_caching=False,
    )
    length = steps + 64
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for number, ids in enumerate(prompts(streams)):
        llm._core.add(str(number), int32(ids), params, max_total=PROMPT + length)
    for _ in range(streams + 1):  # the prompts
        llm._core.step()

    def step() -> None:
        llm._core.step()

    return step


def one(args: argparse.Namespace, engine: str, streams: int) -> float:
    """Measures in a process of its own. Returns CPU seconds of a step."""
    command = [sys.executable] if ENGINES[engine] is not None else shlex.split(args.peer)
    command += [__file__, args.model, args.file, "--one", engine, str(streams)]
    command += ["--steps", str(args.steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{engine}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of safetensors")
    parser.add_argument("file", help="the same model for llama.cpp")
    parser.add_argument("--peer", default="python3", help="command of a Python with llama.cpp")
    parser.add_argument("--streams", type=lambda x: [int(n) for n in x.split(",")], default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        engine, streams, quantization = args.one[0], int(args.one[1]), ENGINES[args.one[0]]
        if quantization is None:
            step = peer_step(args.file, streams)
        else:
            step = own_step(args.model, quantization, streams, args.steps)
        print(median_step(step, args.steps))
        return
    # The process that runs llama.cpp has neither torch nor Quire.
    from quire.tools.bench.record import make_record
    from tables import print_and_append

    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for streams in args.streams:
            for engine in ENGINES:
                times.setdefault((engine, streams), []).append(one(args, engine, streams))
    records = []
    settings = {"steps": args.steps, "rounds": args.rounds, "file": Path(args.file).name}
    for engine in list(ENGINES)[1:]:
        metrics = {}
        for streams in args.streams:
            pairs = zip(times["llama.cpp", streams], times[engine, streams], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs]
            metrics |= {
                f"ratio_{streams}": statistics.median(ratios),
                f"ratio_{streams}_least": min(ratios),
                f"ratio_{streams}_most": max(ratios),
            }
        records.append(make_record("cpu_vs_llama_cpp", metrics, model=engine, settings=settings))
    print(json.dumps({f"{e}, {n}": [round(1e3 * t, 1) for t in v] for (e, n), v in times.items()}))
    print_and_append(records, args.out)


if __name__ == "__main__":
    main()
