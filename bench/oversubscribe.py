"""Measures the throughput that is left when requests ask for more KV memory than there is.

    python bench/oversubscribe.py                                    # the embedded model, on a CPU
    python bench/oversubscribe.py --model bench/configs/qwen2.5-1.5b --load-format dummy \\
        --fitting 64 --prompt-len 512 --output-len 512               # a GPU

The pool holds `--fitting` requests at their full length. The fitting load keeps that many in
flight, the other `--factor` times as many: both run in one engine, one after the other, over the
same number of requests. The ratio of their output tokens per second is what counts. A third run has
a host cache, in an engine of its own, so that preempted requests may be swapped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.sampling_params import SamplingParams

EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "quire-tiny"


class Load:
    """`total` requests, of which at most `most` are in the engine at a time. Lengths vary by a
    quarter around the means, so that requests end at different times."""

    def __init__(self, args: argparse.Namespace, core: EngineCore, seed: int) -> None:
        self._args = args
        self._core = core
        self._random = np.random.default_rng(seed)
        self._made = 0

    def run(self, total: int, most: int) -> dict[str, Any]:
        """Output tokens per second, and what the scheduler had to do for them."""
        before = self._core.stats()
        ended: list[int] = []
        began = time.perf_counter()
        waiting, inside = self._requests(total), 0
        while len(ended) < total:
            while inside < most and self._add(next(waiting, None)):
                inside += 1
            progress = self._core.step()
            for place in [] if progress is None else progress.finished:
                ended.append(progress.requests[place].num_preemptions)  # type: ignore[union-attr]
                inside -= 1
        seconds = time.perf_counter() - began
        after = self._core.stats()
        tokens = after.generation_tokens - before.generation_tokens
        return {
            "in_flight": most,
            "tokens_per_s": round(tokens / seconds, 1),
            "preemptions": after.preemptions - before.preemptions,
            "swapped": after.swapped - before.swapped,
            "most_preemptions_of_one": max(ended),
            "steps": after.steps - before.steps,
        }

    def _requests(self, total: int) -> Iterator[tuple[Any, int]]:
        vocab = self._core.config.vocab_size
        for _ in range(total):
            prompt, output = (
                int(self._random.integers(n * 3 // 4, n * 5 // 4 + 1))
                for n in (self._args.prompt_len, self._args.output_len)
            )
            yield int32(self._random.integers(0, vocab, prompt)), output

    def _add(self, request: tuple[Any, int] | None) -> bool:
        if request is None:
            return False
        prompt, output = request
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self._made += 1
        self._core.add(str(self._made), prompt, params, max_total=len(prompt) + output)
        return True


def engine(args: argparse.Namespace, host_cache_gb: float) -> EngineCore:
    longest = (args.prompt_len + args.output_len) * 5 // 4 + 1
    each = -(-(args.prompt_len + args.output_len) // args.block_size)
    most = int(args.fitting * args.factor)
    settings: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format,
        "max_model_len": longest,
        "max_num_seqs": most,
        "block_size": args.block_size,
        "num_kv_blocks": max(args.fitting * each, -(-longest // args.block_size)),
        "host_cache_gb": host_cache_gb,
        "skip_tokenizer_init": True,
    }
    return build_core(resolve(EngineArgs(**settings)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--fitting", type=int, default=8, help="requests that fit the pool")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--requests", type=int, help="default: 12 times --fitting")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-cache-gb", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="a file for the figures, as JSON")
    args = parser.parse_args()
    total = args.requests or 12 * args.fitting
    rows: dict[str, Any] = {}
    for name, size in (("recompute", 0.0), ("swap", args.host_cache_gb)):
        core = engine(args, size)
        load = Load(args, core, seed=0)
        load.run(min(total, 2 * args.fitting), args.fitting)  # warm up
        runs = []
        for _ in range(args.repeats):
            fitting = load.run(total, args.fitting)
            crowded = load.run(total, int(args.fitting * args.factor))
            runs.append((crowded["tokens_per_s"] / fitting["tokens_per_s"], fitting, crowded))
        ratio, fitting, crowded = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        rows[name] = {"ratio": round(ratio, 3), "fitting": fitting, "crowded": crowded}
        tiers = core.stats().tiers
        if tiers is not None:
            rows[name]["blocks_in_and_out"] = [tiers.swapped_in, tiers.swapped_out]
        core.shutdown()
        print(name, json.dumps(rows[name]), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"args": vars(args), "runs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
