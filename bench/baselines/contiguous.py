"""Compares a KV cache that reserves full lengths with blocks on demand, on GPT-2 124M's shape.

    python bench/baselines/contiguous.py --results DIR          # a GPU
    python bench/baselines/contiguous.py --device cpu --batches 4 8 --repeats 1

Both run the same requests at once, greedily, with random weights. The baseline is a static batch
with a tensor [batch, heads, 1024, head_dim] for each layer and PyTorch's attention. Quire has
blocks for the live tokens. Each run has its own process. Memory is `max_memory_allocated`, with
weights and activations. The last record has the smallest batch from which blocks win.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from crossover import beside, crossover
from torch import Tensor

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.sampling_params import SamplingParams
from quire.tools.bench.record import BenchRecord, append_jsonl, format_table, make_record

CONFIG = Path(__file__).parents[1] / "configs" / "gpt2"
LAYERS, HEADS, HIDDEN, VOCAB, LONGEST = 12, 12, 768, 50257, 1024
BLOCK = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Contiguous:
    """GPT-2 with a cache of [batch, heads, 1024, head_dim] per layer, keys and values."""

    def __init__(self, batch: int, dtype: torch.dtype, device: str) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device) * 0.02

        self.tokens, self.positions = random(VOCAB, HIDDEN), random(LONGEST, HIDDEN)
        self.layers = [
            {
                "qkv": (random(3 * HIDDEN, HIDDEN), random(3 * HIDDEN)),
                "out": (random(HIDDEN, HIDDEN), random(HIDDEN)),
                "up": (random(4 * HIDDEN, HIDDEN), random(4 * HIDDEN)),
                "down": (random(HIDDEN, 4 * HIDDEN), random(HIDDEN)),
            }
            for _ in range(LAYERS)
        ]
        shape = (LAYERS, 2, batch, HEADS, LONGEST, HIDDEN // HEADS)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)

    def step(self, ids: Tensor, start: int) -> Tensor:
        """Returns the likeliest next tokens, int64 [batch, 1].

        Args:
            ids: int64 [batch, new].
            start: position of the first of the new tokens.
        """
        batch, new = ids.shape
        end = start + new
        x = self.tokens[ids] + self.positions[start:end]
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            qkv = F.linear(_norm(x), *layer["qkv"]).view(batch, new, 3, HEADS, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            keys[:, :, start:end], values[:, :, start:end] = k, v
            seen = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], is_causal=new > 1
            )
            x = x + F.linear(seen.transpose(1, 2).reshape(batch, new, HIDDEN), *layer["out"])
            inner = F.gelu(F.linear(_norm(x), *layer["up"]), approximate="tanh")
            x = x + F.linear(inner, *layer["down"])
        return F.linear(_norm(x[:, -1:]), self.tokens).argmax(-1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,))


def run_contiguous(args: argparse.Namespace, batch: int) -> list[float]:
    """Seconds of each repeat."""
    model = Contiguous(batch, DTYPES[args.dtype], args.device)
    seconds = []
    for prompts in _prompts(args, batch):
        began = time.perf_counter()
        ids = torch.from_numpy(prompts).to(args.device)
        made = [model.step(ids, 0)]
        for position in range(args.prompt_len, args.prompt_len + args.output_len - 1):
            made.append(model.step(made[-1], position))
        torch.cat(made, 1).cpu()
        seconds.append(time.perf_counter() - began)
    return seconds


def run_quire(args: argparse.Namespace, batch: int) -> list[float]:
    """Seconds of each repeat."""
    each = -(-(args.prompt_len + args.output_len) // BLOCK)
    settings: dict[str, Any] = {
        "model": str(CONFIG),
        "load_format": "dummy",
        "dtype": args.dtype,
        "device": args.device,
        "max_num_seqs": batch,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": max(batch, 2048),  # room for activations
        "block_size": BLOCK,
        "num_kv_blocks": max(batch * each, LONGEST // BLOCK),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    core = build_core(resolve(EngineArgs(**settings)))
    params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True)
    seconds = []
    for repeat, prompts in enumerate(_prompts(args, batch)):
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            total = args.prompt_len + args.output_len
            core.add(f"{repeat}-{i}", int32(prompt), params, max_total=total)
        ended = 0
        while ended < batch:
            progress = core.step()
            ended += 0 if progress is None else len(progress.finished)
        seconds.append(time.perf_counter() - began)
    core.shutdown()
    return seconds


def _prompts(args: argparse.Namespace, batch: int) -> list[np.ndarray[Any, Any]]:
    """Returns the prompts of each repeat, and first those of a run to warm up."""
    shape = args.repeats + 1, batch, args.prompt_len
    return list(np.random.default_rng(0).integers(0, VOCAB, shape))


RUNS = {"contiguous": run_contiguous, "quire": run_quire}


@torch.inference_mode()
def one(args: argparse.Namespace, kind: str, batch: int) -> dict[str, float]:
    """Measures in a process of its own."""
    seconds = RUNS[kind](args, batch)
    found = {"tok_s": batch * args.output_len / min(seconds[1:])}
    if args.device != "cpu":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def apart(kind: str, batch: int) -> dict[str, float] | None:
    """Runs `one` in another process. Returns None if memory ran out."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", kind, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
    if "OutOfMemory" in done.stderr:
        return None
    raise SystemExit(f"{kind} at {batch}:\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[2**n for n in range(12)])
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--dtype", default="float32", choices=tuple(DTYPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="folder for contiguous.jsonl")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args, args.one[0], int(args.one[1]))))
        return

    def keep(record: BenchRecord) -> None:
        if args.results is not None:
            append_jsonl(args.results / "contiguous.jsonl", [record])

    records: list[BenchRecord] = []
    for batch in args.batches:
        metrics = beside({kind: apart(kind, batch) for kind in RUNS})
        settings = {"dtype": args.dtype, "prompt_len": args.prompt_len,
                    "output_len": args.output_len, "longest": LONGEST}  # fmt: skip
        records.append(make_record(f"contiguous-{batch}", metrics, model="gpt2-124m",
                                   device=args.device, settings=settings))  # fmt: skip
        print(format_table(records[-1:]), flush=True)
        keep(records[-1])
    records.append(crossover(records))
    keep(records[-1])
    print(format_table(records))


if __name__ == "__main__":
    main()
