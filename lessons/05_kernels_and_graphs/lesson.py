"""Kernels and CUDA graphs: fewer passes over memory, fewer launches.

Run it from the repository's root: python -m lessons 5 [--mine FILE]

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lessons import mine
from lessons.common import Loaded, check, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.ops import KVLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORDS = Path(__file__).parents[2] / "bench" / "results" / "h200_ablation.jsonl"


def compare(model: Loaded, rows: int) -> None:
    """Runs both kernels beside plain PyTorch, and the shipped ones beside their twins."""
    kernels = importlib.import_module("lessons.05_kernels_and_graphs.kernels")
    plainly = importlib.import_module("lessons.05_kernels_and_graphs.plain")
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
    plain = [plainly.add_norm(*norm)[1], plainly.attention(*attend)]
    reads = [2 * x.numel() + x.numel(), q.numel() + 2 * int(lengths.sum()) * k[0, 0].numel()]
    works = (plainly.add_norm, norm), (plainly.attention, attend)
    costs = [plainly.cost(work, *given) for work, given in works]
    pairs = zip(["sum and norm", "attention"], costs, reads, strict=True)
    counts = [[name, *each, 1, read] for name, each, read in pairs]
    print(table(["", "launches", "values read", "kernel", "values read"], counts))
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


def own_engine(model: Loaded, count: int) -> None:
    """Writes two texts with the reader's engine, which attends by copies and by the kernel."""
    kernels = importlib.import_module("lessons.05_kernels_and_graphs.kernels")
    own, calls, texts = own_model(model), [0, 0], []

    def kernel(*given: Any) -> Tensor:
        calls[1] += 1
        moved = (each.to(DEVICE) if isinstance(each, Tensor) else each for each in given)
        return kernels.decode_attention(*moved).cpu()

    for each in (None, kernel):
        engine = mine.Engine(own, mine.KernelCache(own, count=16, kernel=each))
        prompts = [model.tokenizer.encode(text).tolist() for text in ("Once upon a time", "Tom")]
        requests = [mine.Request(str(i), ids, len(ids) + count) for i, ids in enumerate(prompts)]
        for request in requests:
            engine.add(request)
        engine.run()
        texts.append([request.tokens for request in requests])
    shown = [repr(model.tokenizer.hub.decode(text[0])) for text in texts]
    rows = zip(["copies", "the kernel"], calls, shown, strict=True)
    print(table(["the reader's engine reads by", "launches", "a text"], rows))
    check(texts[0] == texts[1], "with the kernel it writes the same texts\n")


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
    options.add_argument("--tokens", type=int, default=6, help="tokens that your engine writes")
    args = options.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("skipped: this lesson writes Triton kernels, and triton is not installed")
        return
    if DEVICE == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    model = load(args)
    compare(model, args.rows)
    own_engine(model, args.tokens)
    found = measured(model) if DEVICE == "cuda" else recorded()
    times = [rate["with"] / rate["without"] for rate in found.values()]
    rates = [
        [n, r["without"], r["with"], x] for (n, r), x in zip(found.items(), times, strict=True)
    ]
    print(table(["tokens/s", "launched one by one", "one graph", "x"], rates))
    least = min(times)
    check(least > 1.2, f"a graph is {least:.1f} x as fast at least, for the same kernels")


if __name__ == "__main__":
    main()
