"""Continuous batching: requests join and leave between steps, long prompts come in chunks.

Run it from the repository's root: python -m lessons 4 [--prompt 1200] [--plot FILE]
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

import numpy as np
import torch

from lessons import plots
from lessons.common import Loaded, check, engine, load, parser, skewed_lengths, table
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


@dataclass
class Request:
    """A request has tokens that it knows, and positions that it has computed."""

    name: str
    known: int  # at first its prompt
    total: int
    computed: int = 0


Arrivals = dict[int, list[tuple[str, int, int]]]
"""(name, prompt, prompt and output) of the requests that come before a step."""


def plan(running: list[Request], budget: int, chunked: bool) -> list[tuple[Request, int]]:
    """Chooses a step's rows: first those that lack one token, then prompts, as far as they fit."""
    rows = []
    for request in sorted(running, key=lambda each: each.known - each.computed > 1):
        lacking = request.known - request.computed
        count = min(lacking, budget) if chunked else lacking * (lacking <= budget)
        if count:
            rows.append((request, count))
            budget -= count
    return rows


def simulate(arrivals: Arrivals, budget: int, chunked: bool) -> list[dict[str, int]]:
    """Returns the tokens that each request computes in each step."""
    running: list[Request] = []
    steps: list[dict[str, int]] = []
    while running or len(steps) <= max(arrivals):
        running += [Request(*each) for each in arrivals.get(len(steps), ())]
        rows = plan(running, budget, chunked)
        for request, count in rows:
            request.computed += count
            # A request that has computed all its known tokens gets a new one.
            request.known += request.computed == request.known
        steps.append({request.name: count for request, count in rows})
        running = [request for request in running if request.known < request.total]
    return steps


def run(
    model: Loaded, arrivals: Arrivals, budget: int, chunked: bool
) -> tuple[list[dict[str, int]], list[float], list[list[int]]]:
    """Returns the engine's steps as `simulate` does, their ms (on a CPU its own), and outputs."""
    core = engine(
        model, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, max_num_seqs=8,
        enable_prefix_caching=False,
    )  # fmt: skip
    draw, params = np.random.default_rng(0), SamplingParams(temperature=0.0, ignore_eos=True)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    requests, times = [], []
    steps: list[dict[str, int]] = []
    while core.has_work() or len(steps) <= max(arrivals):
        for name, prompt, total in arrivals.get(len(steps), ()):
            ids = draw.integers(0, model.config["vocab_size"], prompt, dtype=np.int32)
            requests += core.add(name, ids, params, max_total=total)
        began = clock()
        core.step()
        times.append(1e3 * (clock() - began))
        if (step := core.scheduler.last_step) is not None:
            counts = zip(step.requests, step.q_len.tolist(), strict=True)
            steps.append({each.request_id.partition("/")[0]: count for each, count in counts})
    core.shutdown()
    return steps, times, [request.output.tolist() for request in requests]


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=1200, help="tokens of the long prompts")
    options.add_argument("--budget", type=int, default=128, help="tokens of a step, with chunks")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, outputs = load(args), [total - prompt for prompt, total in skewed_lengths(300)]
    rows = [(n, static(outputs, n), continuous(outputs, n)) for n in (1, 8, 32, 128)]
    busy = [(*row, 100 * sum(outputs) / (row[0] * row[2])) for row in rows]
    print(table(["rows", "steps, static", "steps, continuous", "% of rows busy"], busy), "\n")
    _, slow, fast = rows[2]
    check(slow > 1.5 * fast, f"32 rows that refill take {slow / fast:.1f} x fewer steps\n")

    example = simulate({0: [("a", 4, 12), ("b", 4, 12)], 2: [("long", 200, 203)]}, 64, True)
    names = ["a", "b", "long"]
    print(
        table(
            ["step", *names],
            [[i, *(step.get(n, 0) for n in names)] for i, step in enumerate(example)],
        )
    )
    print()

    # Six requests generate; two long prompts come, one after the other.
    first = [(str(i), 20, 60) for i in range(6)]
    size = args.prompt
    arrivals = {0: first, 5: [("x", size, size + 2)], 20: [("y", size, size + 2)]}
    found = {}
    for name, budget, chunked in (("whole", 2048, False), ("in chunks", args.budget, True)):
        steps, times, tokens = run(model, arrivals, budget, chunked)
        check(steps == simulate(arrivals, budget, chunked), f"{name}: the engine plans the same")
        # Between two tokens of the first six lies a step.
        waits = [(sum(s.values()), ms) for s, ms in zip(steps, times, strict=True) if "0" in s]
        found[name] = [np.percentile(each, 99) for each in zip(*waits, strict=True)], steps, tokens
        found[name][0].append(sum("x" in step for step in steps))
    print()
    headers = ["long prompts", "ITL p99, tokens", "ITL p99, ms", "steps to a long one's end"]
    print(table(headers, [[name, *map(float, each[0])] for name, each in found.items()]), "\n")
    (whole, late, _), (chunks, soon, _) = (found[name][0] for name in found)
    fewer = f"the others wait for {chunks:.0f} tokens, not {whole:.0f}"
    check(chunks <= args.budget < whole, fewer)
    check(soon < late, f"so their ITL p99 is {soon:.0f} ms, not {late:.0f}")
    check(found["whole"][2] == found["in chunks"][2], "and nobody's tokens change")
    sizes = {name: [sum(step.values()) for step in each[1]][:40] for name, each in found.items()}
    plots.lines(args.plot, range(40), sizes, ("step", "tokens"), log="y")


if __name__ == "__main__":
    main()
