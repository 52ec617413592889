"""The KV cache: keep what earlier tokens left behind, compute only the new one.

Run it from the repository's root: python -m lessons 2 [--mine FILE] [--tokens 1000] [--plot FILE]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lessons import mine, plots
from lessons.common import Loaded, check, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.tools.bench.trace import watch


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Returns the ms of a call, and what it returns."""
    began = time.perf_counter()
    out = work()
    return 1e3 * (time.perf_counter() - began), out


def mflop(work: Callable[[], Tensor]) -> float:
    """Returns the floating-point operations of a call's matrix products, in millions."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 1e6


def compute_again(model: mine.Model, ids: list[int]) -> Tensor:
    """Returns the logits after the last token, as lesson 1 computes them."""
    x = model.forward(torch.tensor(ids), torch.arange(len(ids)), mine.NoCache())
    return model.logits(x[-1])


def last_token(model: mine.Model, ids: list[int], cache: mine.Cache) -> Tensor:
    """Returns the same logits, with all earlier tokens in the cache."""
    cache.length = len(ids) - 1
    return mine.extend(model, ids[-1:], cache)


def sweep(
    model: mine.Model, ids: list[int], lengths: list[int]
) -> tuple[list[list[float]], list[float]]:
    """Returns for each length the ms of its last token, without and with a cache, and the largest
    difference of the logits; and of the longest MFLOP, without and with."""
    cache, rows = mine.Cache(model, len(ids)), []
    for length in lengths:
        if cache.length < length - 1:
            mine.extend(model, ids[cache.length : length - 1], cache)
        slow, logits = timed(partial(compute_again, model, ids[:length]))
        fast = math.inf
        for _ in range(3):  # the shortest, as short calls are easily disturbed
            ms, same = timed(partial(last_token, model, ids[:length], cache))
            fast = min(fast, ms)
        rows.append([slow, fast, float((logits - same).abs().max())])
    calls = partial(compute_again, model, ids), partial(last_token, model, ids, cache)
    return rows, [mflop(each) for each in calls]


def whole(lengths: list[int], values: list[float]) -> float:
    """Returns the sum over all lengths from 1 to the last, by straight lines between samples."""
    every = np.arange(1, lengths[-1] + 1)
    return float(np.interp(every, lengths, values).sum())


def engine(model: Loaded, prompt: list[int], count: int) -> list[tuple[str, int, int, list[int]]]:
    """Generates `count` tokens on the shipped engine: as that many requests for one token each,
    without and with a cache between them, and as one request."""
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


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=1000, help="longest sequence")
    plots.add_option(options)
    args = options.parse_args(arguments)
    loaded, n = load(args), args.tokens
    model, lengths = own_model(loaded), [1, n // 8, n // 4, n // 2, n]
    ids = torch.randint(0, loaded.config["vocab_size"], (n,)).tolist()
    found, (many, few) = sweep(model, ids, lengths)
    rows = [[i, *row[:2]] for i, row in zip(lengths, found, strict=True)]
    print(table(["token", "ms, all again", "ms, cached"], rows))
    worst = max(row[2] for row in found)
    check(worst < 1e-2, f"the logits are the same: they differ by {worst:.1e} at most")
    check(many > 2 * few, f"token {n} takes {few:,.0f} MFLOP with a cache, {many:,.0f} without")
    slow, fast = (whole(lengths, [row[i] for row in found]) for i in range(2))
    check(slow > 2 * fast, f"{n} tokens take 1/{slow / fast:.0f} of the time: {fast / 1e3:.1f} s\n")

    prompt = loaded.tokenizer.encode("Once upon a time").tolist()
    ran = engine(loaded, prompt, 12)
    print(table(["the engine, 12 tokens", "steps", "positions"], [row[:3] for row in ran]))
    same, once = all(row[3] == ran[0][3] for row in ran), len(ran[2][3]) - 1
    check(same and ran[2][2] == once, f"one request computes {once} positions, each once")
    ours = mine.generate_cached(model, prompt, 12, mine.greedy)
    check(prompt + ours == ran[2][3], "generate_cached picks the engine's tokens")
    series = {"all again": [row[0] for row in found], "KV cache": [row[1] for row in found]}
    plots.lines(args.plot, lengths, series, ("tokens so far", "ms for one more"), log="y")


if __name__ == "__main__":
    main()
