"""Counts the answers of a server to which four times as much comes as it can take.

    python bench/overload.py                                    # the embedded model, on a CPU
    python bench/overload.py --flags "MODEL --load-format dummy ..." --streams 256 --device cuda

First the capacity: as many streams as the server runs at once, each asking again when it has its
answer. Then `--factor` times that rate of requests, as a Poisson process, whoever waits: what the
queue does not hold is refused with 503. Answers per second, by those of the
capacity, is what counts; an answer that failed or came after `--slo` seconds does not. Rounds
alternate between both; the median of their ratios is taken, as other work on a machine disturbs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.load import Lengths
from quire.tools.bench.online.sweep import Plan, levels
from quire.tools.bench.record import make_record
from tables import print_and_append


def _round(
    plan: Plan, server: Server, name: str, args: argparse.Namespace, seed: int
) -> dict[str, float]:
    (capacity,) = levels(
        dataclasses.replace(plan, seed=2 * seed), server, name, [args.streams], print
    )
    rate = args.factor * capacity.metrics["request_s"]
    count = round(args.factor * args.requests)
    flood = dataclasses.replace(plan, rate=rate, count=count, warmup=0, seed=2 * seed + 1)
    (level,) = levels(flood, server, name, [0], print)
    found, best = level.metrics, capacity.metrics
    return {
        "capacity_tok_s": best["output_tok_s"],
        "offered_request_s": rate,
        "answered": found["requests"],
        "refused": found["failed"],
        "output_tok_s": found["output_tok_s"],
        "goodput_percent": 100 * found["goodput_s"] / best["goodput_s"],
        "e2el_p95_ms": found["e2el_p95_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flags", default="--device cpu --kv-cache-gb 1", help="of quire serve")
    parser.add_argument("--streams", type=int, default=16, help="requests that run at once")
    parser.add_argument("--queue", type=int, help="default: as many")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=200, help="that measure the capacity")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--slo", type=float, default=30.0, help="seconds for an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="whose name is recorded")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    queue = args.queue or args.streams
    limits = f"--max-num-seqs {args.streams} --max-queue {queue} --no-enable-prefix-caching"
    plan = Plan(
        lengths=Lengths(input_len=args.input_len, output_len=args.output_len),
        sampling={"temperature": 0.0, "ignore_eos": True},
        count=args.requests,
        warmup=args.streams,
        processes=1,
        goodput={"e2el": args.slo * 1000},
    )
    with launched(f"{args.flags} {limits}") as (url, _):
        server = Server(url, {})
        name = server.model()
        rounds = [_round(plan, server, name, args, seed) for seed in range(args.rounds)]
    metrics = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    metrics["goodput_percent_least"] = min(each["goodput_percent"] for each in rounds)
    settings = {"factor": args.factor, "streams": args.streams, "queue": queue, "slo_s": args.slo}
    record = make_record("overload", metrics, model=name, device=args.device, settings=settings)
    print_and_append([record], args.out)


if __name__ == "__main__":
    main()
