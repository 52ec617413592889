"""Continuous batching: requests join and leave between steps, long prompts come in chunks.

Run it from the repository's root: python -m lessons 4 [--mine FILE] [--prompt 1200] [--plot FILE]
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import numpy as np
import torch

from lessons import mine, plots
from lessons.common import Loaded, check, engine, load, own_model, parser, skewed_lengths, table
from quire import SamplingParams


def static(outputs: list[int], rows: int) -> int:
    """Returns the steps of batches that begin and end together."""
    return sum(max(outputs[i : i + rows]) for i in range(0, len(outputs), rows))


def continuous(outputs: list[int], rows: int) -> int:
    """Returns the steps if the next request takes a row as soon as one is free."""
    ends = [0] * rows
    for length in outputs:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


Arrivals = dict[int, list[tuple[str, int, int]]]
"""(name, prompt, prompt and output) of the requests that come before a step."""
Ran = tuple[list[dict[str, int]], list[float], list[list[int]]]
"""The tokens of each request in each step, the steps' ms, and the outputs."""
clock = time.perf_counter if torch.cuda.is_available() else time.process_time


def prompts(model: Loaded, arrivals: Arrivals) -> dict[str, list[int]]:
    """Returns a random prompt for each request."""
    draw = np.random.default_rng(0)
    sizes = {name: size for come in arrivals.values() for name, size, _ in come}
    vocab = model.config["vocab_size"]
    return {name: draw.integers(0, vocab, size).tolist() for name, size in sizes.items()}


def run_mine(model: Loaded, arrivals: Arrivals, budget: int) -> Ran:
    """Runs the requests on the reader's engine."""
    own = own_model(model)
    core = mine.Engine(own, mine.PagedCache(own, count=256), budget, most=8)
    texts, times, requests = prompts(model, arrivals), [], []
    steps: list[dict[str, int]] = []
    while core.running or core.waiting or len(steps) <= max(arrivals):
        for name, _, total in arrivals.get(len(steps), ()):
            requests.append(mine.Request(name, list(texts[name]), total))
            core.add(requests[-1])
        began = clock()
        rows = core.step()
        times.append(1e3 * (clock() - began))
        steps.append({request.name: count for request, count in rows})
    return steps, times, [each.tokens[len(texts[each.name]) :] for each in requests]


def run_shipped(model: Loaded, arrivals: Arrivals, budget: int) -> Ran:
    """Runs the same requests on the shipped engine."""
    core = engine(model, max_num_batched_tokens=budget, max_num_seqs=8, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    texts, times, requests = prompts(model, arrivals), [], []
    steps: list[dict[str, int]] = []
    while core.has_work() or len(steps) <= max(arrivals):
        for name, _, total in arrivals.get(len(steps), ()):
            requests += core.add(
                name, np.array(texts[name], dtype=np.int32), params, max_total=total
            )
        began = clock()
        core.step()
        times.append(1e3 * (clock() - began))
        if (step := core.scheduler.last_step) is not None:
            counts = zip(step.requests, step.q_len.tolist(), strict=True)
            steps.append({each.request_id.partition("/")[0]: count for each, count in counts})
    core.shutdown()
    return steps, times, [request.output.tolist() for request in requests]


def example(model: Loaded) -> list[dict[str, int]]:
    """Returns the steps of two short requests, and of a long one that comes after two steps."""
    arrivals: Arrivals = {0: [("a", 4, 12), ("b", 4, 12)], 2: [("long", 200, 203)]}
    return run_mine(model, arrivals, 64)[0]


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=1200, help="tokens of the long prompts")
    options.add_argument("--budget", type=int, default=128, help="tokens of a step, with chunks")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, outputs = load(args), [total - prompt for prompt, total in skewed_lengths(300)]
    rows = [(n, static(outputs, n), continuous(outputs, n)) for n in (1, 8, 32, 128)]
    busy = [(*row, 100 * sum(outputs) / (row[0] * row[2])) for row in rows]
    print(table(["rows", "steps, static", "steps, continuous", "% of rows busy"], busy))
    _, slow, fast = rows[2]
    check(slow > 1.5 * fast, f"32 rows that refill take {slow / fast:.1f} x fewer steps\n")

    names = ["a", "b", "long"]
    planned = [[i, *(step.get(n, 0) for n in names)] for i, step in enumerate(example(model))]
    print(table(["step", *names], planned))
    check(all(sum(row[1:]) <= 64 for row in planned), "no step has more than 64 tokens\n")

    # Six requests generate; two long prompts come, one after the other.
    size, shown, found, tokens = args.prompt, list[list[Any]](), {}, []
    first = [(str(i), 20, 60) for i in range(6)]
    arrivals = {0: first, 5: [("x", size, size + 2)], 20: [("y", size, size + 2)]}
    for name, budget in (("whole", 2048), ("in chunks", args.budget)):
        ours, theirs = (run(model, arrivals, budget) for run in (run_mine, run_shipped))
        for engine_name, ran in (("mine", ours), ("Quire", theirs)):
            # Between two tokens of the first six lies a step.
            waits = [(sum(s.values()), ms) for s, ms in zip(*ran[:2], strict=True) if "0" in s]
            late = [float(np.percentile(each, 99)) for each in zip(*waits, strict=True)]
            shown.append([name, engine_name, *late, sum("x" in step for step in ran[0])])
            tokens.append(ran[2])
        found[name] = ours[0], theirs[0]
    headers = [
        "long prompts",
        "engine",
        "ITL p99, tokens",
        "ITL p99, ms",
        "steps to a long one's end",
    ]
    print(table(headers, shown))
    for name, (steps, same) in found.items():
        check(steps == same, f"{name}: both engines plan the same {len(steps)} steps")
    check(all(each == tokens[0] for each in tokens), "and everybody gets the same tokens")
    (_, _, whole, late, _), (_, _, chunks, soon, _) = shown[0], shown[2]
    fewer = f"the others wait for {chunks:.0f} tokens, not {whole:.0f}"
    check(chunks <= args.budget < whole, fewer)
    check(soon < late, f"so their ITL p99 is {soon:.0f} ms, not {late:.0f}")
    sizes = {name: [sum(step.values()) for step in each[0]][:40] for name, each in found.items()}
    plots.lines(args.plot, range(40), sizes, ("step", "tokens"), log="y")


if __name__ == "__main__":
    main()
