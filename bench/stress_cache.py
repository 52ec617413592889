"""Checks that random requests on a tiny KV pool with all tiers leak no block and change no token.

    python bench/stress_cache.py                          # a CPU: tiny random weights, fp32
    python bench/stress_cache.py --model bench/configs/qwen2.5-1.5b --load-format dummy \\
        --deterministic --requests 10000 --blocks 4000 --host-cache-gb 2    # a GPU

Requests share prefixes, come in bursts, ask for n > 1, and are aborted at random points. They run
again without aborts and without a cache. Completions must have the same tokens, and an aborted one
must be a beginning of its twin. This needs --deterministic on a GPU and fp32 on a CPU. Prints one
line of JSON. The exit status is 0 without leak and mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.request import FinishReason, Request
from quire.sampling_params import SamplingParams

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "vocab_size": 128, "torch_dtype": "float32",
}  # fmt: skip


@dataclass
class Job:
    """One request, aborted after `leaves` output tokens unless that is None."""

    prompt: list[int]
    params: SamplingParams
    leaves: int | None
    requests: list[Request] = field(default_factory=list)


def make_jobs(count: int, vocab: int, longest: int, seed: int) -> list[Job]:
    """Returns requests whose prompts share prefixes of any length."""
    draw = np.random.default_rng(seed)
    stems = draw.integers(6, vocab, (12, longest)).tolist()
    jobs = []
    for i in range(count):
        stem = stems[min(int(draw.geometric(0.25)), len(stems)) - 1]
        shared = int(draw.integers(0, longest * 2 // 3))
        own = draw.integers(6, vocab, int(draw.integers(1, max(2, longest // 8)))).tolist()
        most = int(draw.integers(1, max(2, longest // 3)))
        warm = draw.random() < 0.5
        params = SamplingParams(
            temperature=1.0 if warm else 0.0,
            seed=i,
            n=int(draw.choice([1, 1, 1, 2, 3])) if warm else 1,
            max_tokens=most,
            ignore_eos=bool(draw.random() < 0.7),
        )
        leaves = int(draw.integers(0, most)) if draw.random() < 0.15 else None
        jobs.append(Job(stem[:shared] + own, params, leaves))
    return jobs


def written(job: Job) -> int:
    return max(request.num_output_tokens for request in job.requests)


def run(core: EngineCore, jobs: list[Job], aborts: bool, most: int, seed: int) -> dict[str, Any]:
    """Runs requests in bursts, at most `most` at a time, until the engine is empty."""
    draw = np.random.default_rng(seed + 1)
    waiting = list(enumerate(jobs))[::-1]
    inside: dict[int, Job] = {}
    aborted = 0
    began = time.perf_counter()
    while waiting or inside or core.has_work():
        for _ in range(int(draw.integers(0, 6))):
            if not waiting or len(inside) >= most:
                break
            i, job = waiting.pop()
            length = len(job.prompt) + (job.params.max_tokens or 0)
            job.requests = core.add(str(i), int32(job.prompt), job.params, max_total=length)
            inside[i] = job
        core.step()
        for i, job in list(inside.items()):
            if all(request.finished for request in job.requests):
                del inside[i]
            elif aborts and job.leaves is not None and written(job) >= job.leaves:
                core.abort(str(i))
                aborted += 1
                del inside[i]
    stats = core.stats()
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "aborted": aborted,
        "preemptions": stats.preemptions,
        "swapped": stats.swapped,
        "hit_tokens": stats.prefix_hit_tokens,
        "leaked_blocks": sum(stats.blocks_used),
        "running_or_waiting": stats.running + stats.waiting,
    }


def leaks_after_reset(core: EngineCore) -> int:
    """Returns the number of blocks that stay used after a reset of the prefix cache."""
    core.scheduler.reset_prefix_cache()
    stats = core.stats()
    return sum(stats.blocks_total) - sum(stats.blocks_free)


def mismatches(jobs: list[Job], twins: list[Job]) -> int:
    wrong = 0
    for job, twin in zip(jobs, twins, strict=True):
        for one, other in zip(job.requests, twin.requests, strict=True):
            got, want = one.output.tolist(), other.output.tolist()
            if one.finish_reason is FinishReason.ABORT:
                want = want[: len(got)]
            wrong += got != want
    return wrong


def stress(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Returns the figures of both runs, with `mismatches` and `leaked_blocks`."""
    shared: dict[str, Any] = {
        "model": model,
        "load_format": args.load_format,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "deterministic": args.deterministic,
        "enforce_eager": args.enforce_eager,
        "block_size": args.block_size,
        "max_model_len": args.longest * 3 // 2,
        "max_num_seqs": args.lanes,
        "max_num_batched_tokens": args.budget,
        "skip_tokenizer_init": True,
    }
    if args.device:
        shared["device"] = args.device
    with tempfile.TemporaryDirectory() as folder:
        tiers: dict[str, Any] = {
            "num_kv_blocks": args.blocks,
            "host_cache_gb": args.host_cache_gb,
            "disk_cache": str(Path(folder) / "kv") if args.disk_cache_gb else None,
            "disk_cache_gb": args.disk_cache_gb or 1.0,
        }
        core = build_core(resolve(EngineArgs(**shared, **tiers)))
        made = (args.requests, core.config.vocab_size, args.longest, args.seed)
        jobs = make_jobs(*made)
        found = run(core, jobs, True, args.lanes * 2, args.seed)
        tier_stats = core.stats().tiers
        found["leaked_blocks"] += leaks_after_reset(core)
        core.shutdown()
    plain = build_core(resolve(EngineArgs(**shared, enable_prefix_caching=False)))
    twins = make_jobs(*made)
    bare = run(plain, twins, False, args.lanes * 2, args.seed)
    plain.shutdown()
    return {
        "requests": args.requests,
        "mismatches": mismatches(jobs, twins),
        "leaked_blocks": found.pop("leaked_blocks") + found.pop("running_or_waiting"),
        "with_tiers": found,
        "tiers": None
        if tier_stats is None
        else {name: getattr(tier_stats, name) for name in tier_stats.__struct_fields__},
        "without_cache": bare,
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: tiny random weights")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=200, help="about the longest sequence")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=12)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--host-cache-gb", type=float, default=0.0006)
    parser.add_argument("--disk-cache-gb", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file for the figures, as JSON")
    return parser.parse_args(words)


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
        found = stress(args, args.model or folder)
    print(json.dumps(found))
    if args.out:
        Path(args.out).write_text(json.dumps({"args": vars(args)} | found, indent=1))
    return int(found["mismatches"] > 0 or found["leaked_blocks"] > 0)


if __name__ == "__main__":
    sys.exit(main())
