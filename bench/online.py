"""Measures a server on one GPU for 1 to 256 streams, and compares it with targets.

    python bench/online.py MODEL_FOLDER --tokenizer FOLDER --results bench/results
    python bench/online.py MODEL_FOLDER --quick --flags "--api-workers 4"

Weights are random, so the folder needs only its config.json. The load is the one of the peers'
figures: random prompts of 512 tokens as text, and streamed answers of 256 tokens. One server
answers all levels: those of the targets, then 1, 2, 4 to 128 users. Then the offline API runs the
requests of the highest level.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.load import Lengths, random_asks
from quire.tools.bench.online.sweep import SweepPlan, levels
from quire.tools.bench.record import BenchRecord, append_jsonl, format_table, make_record

# By streams: (tokens/s, TTFT p50 ms, ITL p95 ms) to reach.
TARGETS = {
    "qwen3-0.6b": {4: (2600, 12, 1.6), 64: (20_000, 110, 6), 256: (32_000, 300, 25)},
    "qwen3-8b": {4: (900, 40, 4.8), 64: (6800, 400, 8)},
}
USERS = (1, 2, 4, 8, 16, 32, 64, 128)
INPUT, OUTPUT = 512, 256
SHOWN = ("output_tok_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms",
         "tpot_p50_ms", "e2el_p50_ms", "client_cpu", "failed", "speedup", "of_offline")  # fmt: skip


def offline(folder: Path, tokenizer: Path, requests: int) -> float:
    """Output tokens/s of the same requests through `LLM.generate`, as many at once."""
    llm = LLM(
        str(folder), tokenizer=str(tokenizer), load_format="dummy", enable_prefix_caching=False
    )
    asks = random_asks(requests, Lengths(input_len=INPUT, output_len=OUTPUT), 10_000, 1)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    llm.generate(prompts[:64], params, use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.shutdown()
    return requests * OUTPUT / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder with config.json, named as a target's")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of its tokenizer")
    parser.add_argument("--flags", default="", help="more flags of quire serve")
    parser.add_argument("--results", type=Path, help="a folder to append the records in")
    parser.add_argument("--quick", action="store_true", help="only the targets' levels")
    parser.add_argument("--levels", type=int, nargs="+", help="instead of the targets'")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
    targets = TARGETS.get(args.model.name, {4: (0, 0, 0), 64: (0, 0, 0)})
    chosen = args.levels or list(targets)
    users = [] if args.quick or args.model.name == "qwen3-8b" else list(USERS)
    flags = (
        f"{args.model} --tokenizer {args.tokenizer} --load-format dummy --no-enable-prefix-caching "
        f"--max-model-len 2048 {args.flags}"
    )
    sampling = {"temperature": 0.0, "ignore_eos": True}
    lengths = Lengths(input_len=INPUT, output_len=OUTPUT)
    records: list[BenchRecord] = []
    began = time.perf_counter()
    with launched(flags) as (url, _):
        print(f"the server started in {time.perf_counter() - began:.1f} s", flush=True)
        server = Server(url, {})
        name = server.model()
        for part, streams in (("serve", chosen), ("users", users)):
            plan = SweepPlan(
                lengths=lengths, sampling=sampling, warmup=32 if part == "serve" else 0
            )
            for level in levels(plan, server, name, streams, print):
                for problem in level.problems:
                    print("  ", problem, flush=True)
                about = {"flags": args.flags, "streams": level.concurrency}
                record = make_record(
                    f"{part}-{level.concurrency}", level.metrics, model=name, device=args.device,
                    settings=about,
                )  # fmt: skip
                if part == "users":
                    first = next((r for r in records if r.case == "users-1"), record)
                    one = first.metrics["output_tok_s"]
                    record.metrics["speedup"] = record.metrics["output_tok_s"] / one
                records.append(record)
    if max(chosen) >= 256:
        most = max(chosen)
        rate = offline(args.model, args.tokenizer, 4 * most)
        record = make_record(f"offline-{most}", {"output_tok_s": rate}, model=name,
                             device=args.device)  # fmt: skip
        online = next(r for r in records if r.case == f"serve-{most}")
        online.metrics["of_offline"] = online.metrics["output_tok_s"] / rate
        records.append(record)
    if args.results is not None:
        append_jsonl(args.results / "online.jsonl", records)
    hidden = [m for record in records for m in record.metrics if m not in SHOWN]
    print(format_table(records, leave_out=hidden))
    for streams, (rate, ttft, itl) in targets.items():
        print(f"to reach at {streams}: {rate} tok/s, TTFT p50 {ttft} ms, ITL p95 {itl} ms")


if __name__ == "__main__":
    main()
