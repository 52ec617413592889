"""Kernels and CUDA graphs: fewer passes over memory, fewer launches.

Run it from the repository's root: python -m lessons 5 (without a GPU: in Triton's interpreter)
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams
from quire.ops import KVLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORDS = Path(__file__).parents[2] / "bench" / "results" / "h200_ablation.jsonl"
VIEWS = {"aten::as_strided", "aten::view", "aten::empty", "aten::empty_strided"}
"""Ops that launch nothing."""


def plain_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Attends as lesson 3 does, row by row: gathers the blocks, repeats heads, masks nothing."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        keys, values = (each[blocks[row].long()].flatten(0, 1)[:length] for each in (k, v))
        share = q.shape[1] // k.shape[2]
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        scores = torch.einsum("hd,khd->hk", q[row] * scale, keys)
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def cost(work: Callable[..., Any], *given: Any) -> tuple[int, int]:
    """Returns how many ops a call on the CPU launches, and how many values these read."""
    given = tuple(each.cpu() if isinstance(each, Tensor) else each for each in given)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work(*given)
    ops = [each for each in profiler.events() if not each.cpu_children and each.name not in VIEWS]
    return len(ops), sum(math.prod(shape) for each in ops for shape in each.input_shapes if shape)


def compare(model: Loaded, rows: int) -> None:
    """Runs both kernels beside plain PyTorch, and the shipped ones beside their twins."""
    kernels = importlib.import_module("lessons.05_kernels_and_graphs.kernels")
    shipped = importlib.import_module("quire.ops.triton")
    mixer, width, eps = model.spec.attention[0], model.spec.hidden_size, 1e-6
    x, residual = torch.randn(2, rows, width, device=DEVICE)
    weight = torch.randn(width, device=DEVICE)
    lengths = torch.arange(20, 20 + 7 * rows, 7, device=DEVICE, dtype=torch.int32)
    longest = int(lengths.max())
    blocks = torch.randperm(rows * -(-longest // 16), device=DEVICE).int().view(rows, -1)
    k, v = torch.randn(2, blocks.numel(), 16, mixer.kv_heads, mixer.head_dim, device=DEVICE)
    q = torch.randn(rows, mixer.heads, mixer.head_dim, device=DEVICE)
    norm, attend = (x, residual, weight, eps), (q, k, v, blocks, lengths, mixer.scale)

    ours = [kernels.add_norm(*norm)[1], kernels.decode_attention(*attend)]
    plain = [plain_add_norm(*norm)[1], plain_attention(*attend)]
    reads = [2 * x.numel() + x.numel(), q.numel() + 2 * int(lengths.sum()) * k[0, 0].numel()]
    costs = [cost(plain_add_norm, *norm), cost(plain_attention, *attend)]
    pairs = zip(["sum and norm", "attention"], costs, reads, strict=True)
    counts = [[name, *each, 1, read] for name, each, read in pairs]
    print(table(["", "launches", "values read", "kernel", "values read"], counts), "\n")
    errors = [float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)]
    check(max(errors) < 1e-4, f"the kernels are right: they differ by {max(errors):.1e} at most")
    less = costs[1][1] / reads[1]
    check(less > 2, f"attention reads 1/{less:.1f} of the values in 1 launch of {costs[1][0]}")

    starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
    layer = KVLayer(*(each.transpose(1, 2).contiguous() for each in (k, v)))
    paged = (q, layer, starts, lengths, blocks)
    bounds: dict[str, Any] = {"max_q_len": 1, "max_seq_len": longest, "scale": mixer.scale}
    seen = shipped.paged_attention(*paged, q_lens=(1,) * rows, **bounds)
    theirs = [shipped.rms_norm(x + residual, weight, eps), seen]
    errors = [float((a - b).abs().max()) for a, b in zip(theirs, plain, strict=True)]
    check(max(errors) < 1e-4, f"so are the engine's, on the same blocks: {max(errors):.1e}\n")


def recorded() -> dict[str, dict[str, float]]:
    """Returns tokens/s on an H200 by case, "with" graphs and "without", as the record has them."""
    found: dict[str, dict[str, float]] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        off, rate = record["settings"]["off"], record["metrics"].get("output_tok_s")
        if rate is not None and off in ("", "graphs"):
            case = f"{record['model']}, {record['case'].removeprefix('ablation:')}"
            found.setdefault(case, {})["without" if off else "with"] = rate
    return found


def measured(model: Loaded) -> dict[str, dict[str, float]]:
    """Returns tokens/s of one request on this GPU."""
    kernels = importlib.import_module("lessons.05_kernels_and_graphs.kernels")
    eager, replayed = kernels.capture_and_time()
    print(f"100 norms: {eager:.0f} µs launched one by one, {replayed:.0f} µs as a graph\n")
    found = {}
    for name, eager in (("with", False), ("without", True)):
        llm = LLM(str(model.path), enforce_eager=eager, enable_prefix_caching=False)
        params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        llm.generate(["Once upon a time"], params, use_tqdm=False)  # compiles what is left
        began = time.perf_counter()
        llm.generate(["Once upon a time"], params, use_tqdm=False)
        found[name] = 256 / (time.perf_counter() - began)
        llm.shutdown()
    return {"this GPU, one request": found}


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=4, help="rows of a step")
    args = options.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("skipped: this lesson writes Triton kernels, and triton is not installed")
        return
    if DEVICE == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    model = load(args)
    compare(model, args.rows)
    found = measured(model) if DEVICE == "cuda" else recorded()
    times = [rate["with"] / rate["without"] for rate in found.values()]
    rates = [
        [n, r["without"], r["with"], x] for (n, r), x in zip(found.items(), times, strict=True)
    ]
    print(table(["tokens/s", "launched one by one", "one graph", "x"], rates), "\n")
    least = min(times)
    check(least > 1.2, f"a graph is {least:.1f} x as fast at least, for the same kernels")


if __name__ == "__main__":
    main()
