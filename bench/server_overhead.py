"""Measures the cost of a streamed token for the API process.

    python bench/server_overhead.py                  # the embedded model on a CPU, 64 streams
    python bench/server_overhead.py --streams 256 --endpoint chat

Starts a server and clients in separate processes. Divides the CPU time of the API process and of
the engine by the number of streamed tokens. On a CPU the engine's time includes the model. System
time of the API process is sending to sockets. With few cores it includes the receiver's part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.load import Lengths
from quire.tools.bench.online.sweep import SweepPlan, levels
from quire.tools.bench.record import make_record
from tables import print_and_append


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Returns user and system seconds of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[11:13])
    return user, system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flags", default="--device cpu --kv-cache-gb 1", help="of quire serve")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--endpoint", default="completions", choices=("completions", "chat"))
    parser.add_argument("--device", default="cpu", help="whose name is recorded")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    lengths = Lengths(input_len=args.input_len, output_len=args.output_len)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    plan = SweepPlan(endpoint=args.endpoint, lengths=lengths, sampling=sampling, warmup=0)
    with launched(args.flags) as (url, api):
        engine = int(subprocess.check_output(["pgrep", "-P", str(api)]).split()[0])
        server = Server(url, {})
        name = server.model()
        for _ in range(2):  # the first warms up
            before = *cpu_seconds(api), *cpu_seconds(engine)
            (level,) = levels(plan, server, name, [args.streams], print)
            after = *cpu_seconds(api), *cpu_seconds(engine)
    tokens = level.metrics["output_tokens"]
    user, system, *of_engine = ((b - a) / tokens * 1e6 for a, b in zip(before, after, strict=True))
    metrics = {
        "api_us_per_token": user + system,
        "api_user_us_per_token": user,
        "engine_us_per_token": sum(of_engine),
        "output_tok_s": level.metrics["output_tok_s"],
        "failed": level.metrics["failed"],
    }
    settings = {"streams": args.streams, "endpoint": args.endpoint, "output_len": args.output_len}
    record = make_record("server-overhead", metrics, model=name, device=args.device,
                         settings=settings)  # fmt: skip
    print_and_append([record], args.out)


if __name__ == "__main__":
    main()
