"""The KV cache: keep what earlier tokens left behind, compute only the new one.

Run it from the repository's root: python -m lessons 2 [--tokens 1000] [--plot FILE]
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lessons import plots
from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams
from quire.tools.bench.trace import watch

lesson_01 = importlib.import_module("lessons.01_generation.lesson")


class CachedQwen3(lesson_01.Qwen3):  # type: ignore[name-defined,misc]
    """The model of lesson 1, with keys and values of all positions so far.

    k, v: by layer, [kv_heads, room, head_dim].
    """

    def __init__(self, model: Loaded, room: int) -> None:
        super().__init__(model)
        shape = self.layers, self.kv_heads, room, self.head_dim
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def step(self, ids: Tensor) -> Tensor:
        """ids: int64 [T], the tokens after those in the cache: a whole prompt, or one new token.
        Returns the logits after the last one."""
        logits: Tensor = self.forward(ids, start=self.length)
        self.length += len(ids)
        return logits

    def attention(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x, layer, positions)
        self.k[layer, :, positions], self.v[layer, :, positions] = k, v
        seen = torch.arange(int(positions[-1]) + 1)
        keys, values = self.k[layer, :, : len(seen)], self.v[layer, :, : len(seen)]
        causal = positions[:, None] >= seen[None, :]
        return self.attend(q, keys, values, causal, layer)


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Returns the ms of a call, and what it returns."""
    began = time.perf_counter()
    out = work()
    return 1e3 * (time.perf_counter() - began), out


def mflop(work: Callable[[], Tensor]) -> float:
    """Returns the floating-point operations of a call's matrix products, in millions."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        work()
    products = [
        event for event in profiler.key_averages() if event.key in ("aten::mm", "aten::bmm")
    ]
    return sum(event.flops for event in products) / 1e6


def sweep(model: Loaded, ids: Tensor, lengths: list[int]) -> tuple[list[list[float]], list[float]]:
    """Returns for each length the ms of its last token, without and with a cache, and the largest
    difference of the logits; and of the longest MFLOP, without and with."""
    qwen, cached, rows = lesson_01.Qwen3(model), CachedQwen3(model, len(ids)), []
    for length in lengths:
        if cached.length < length - 1:
            cached.step(ids[cached.length : length - 1])
        slow, logits = timed(partial(qwen.forward, ids[:length]))
        fast = math.inf
        for _ in range(3):  # the shortest, as short calls are easily disturbed
            cached.length = length - 1
            ms, same = timed(partial(cached.step, ids[length - 1 : length]))
            fast = min(fast, ms)
        rows.append([slow, fast, float((logits - same).abs().max())])
    cached.length -= 1
    return rows, [mflop(partial(qwen.forward, ids)), mflop(partial(cached.step, ids[-1:]))]


def whole(lengths: list[int], values: list[float]) -> float:
    """Returns the sum over all lengths from 1 to the last, by straight lines between samples."""
    every = np.arange(1, lengths[-1] + 1)
    return float(np.interp(every, lengths, values).sum())


def engine(model: Loaded, count: int) -> list[tuple[str, int, int, list[int]]]:
    """Generates `count` tokens on the shipped engine: as that many requests for one token each,
    without and with a cache between them, and as one request."""
    prompt = model.tokenizer.encode("Once upon a time").tolist()
    rows = []
    for name, caching, each in (
        ("a request for each token", False, 1),
        ("the same, with its prefix cache", True, 1),
        ("one request", False, count),
    ):
        path = str(model.path)
        llm = LLM(path, device="cpu", max_model_len=512, enable_prefix_caching=caching)
        params = SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True)
        recorder, tokens = watch(llm), list(prompt)
        while len(tokens) < len(prompt) + count:
            (output,) = llm.generate([tokens], params, use_tqdm=False)
            tokens += output.outputs[0].token_ids
        steps = recorder.take()
        rows.append((name, len(steps), sum(step.plan.num_tokens for step in steps), tokens))
        llm.shutdown()
    return rows


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=1000, help="longest sequence")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, n = load(args), args.tokens
    lengths = [1, n // 8, n // 4, n // 2, n]
    found, (many, few) = sweep(model, torch.randint(0, model.config["vocab_size"], (n,)), lengths)
    rows = [[i, *row[:2]] for i, row in zip(lengths, found, strict=True)]
    print(table(["token", "ms, all again", "ms, cached"], rows), "\n")
    worst = max(row[2] for row in found)
    check(worst < 1e-2, f"the logits are the same: they differ by {worst:.1e} at most")
    check(many > 2 * few, f"token {n} takes {few:,.0f} MFLOP with a cache, {many:,.0f} without")
    slow, fast = (whole(lengths, [row[i] for row in found]) for i in range(2))
    check(slow > 2 * fast, f"{n} tokens take 1/{slow / fast:.0f} of the time: {fast / 1e3:.1f} s\n")
    ran = engine(model, 12)
    print(table(["the engine, 12 tokens", "steps", "positions"], [row[:3] for row in ran]), "\n")
    same = all(row[3] == ran[0][3] for row in ran)
    once = len(ran[2][3]) - 1  # nobody asks what comes after the last token
    check(same and ran[2][2] == once, f"one request computes {once} positions, each once")
    series = {"all again": [row[0] for row in found], "KV cache": [row[1] for row in found]}
    plots.lines(args.plot, lengths, series, ("tokens so far", "ms for one more"), log="y")


if __name__ == "__main__":
    main()
