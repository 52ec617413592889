"""Measures the gain of the prefix cache, and its cost if there is nothing to reuse.

    python bench/prefix_cache.py FOLDER --part ttft --part chats --part cost --part pool

FOLDER holds a config.json; weights are random, no tokenizer is needed.

ttft    time to the first token of 64 tokens after a prefix of 2083 tokens, which is new (cold),
        cached (warm), or left out (lone)
chats   users with one system prompt and conversations of several turns: the reused tokens as a
        share of all reusable tokens
cost    requests without a common prefix, with the cache on and off
pool    throughput by the number of KV blocks, as a share of the load's peak need
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.tools.bench.cases import NAMED
from quire.tools.bench.record import make_record
from tables import print_and_append

PREFIX, OWN = 2083, 64
USERS, TURNS, SYSTEM, QUESTION, ANSWER = 64, 8, 1500, 50, 60


def engine(args: argparse.Namespace, **settings: Any) -> LLM:
    settings = {"device": args.device, "load_format": "dummy", **settings}
    return LLM(str(args.model), skip_tokenizer_init=True, **settings)


def ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, 6_000) for _ in range(count)]


def ask(llm: LLM, prompts: list[list[int]], tokens: int | list[int]) -> tuple[float, list[Any]]:
    lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - start, outputs


def ttft(args: argparse.Namespace) -> dict[str, float]:
    llm, draw = engine(args), random.Random(0)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "lone": []}
    cached = 0
    for trial in range(10):
        prefix = ids(draw, PREFIX)
        for kind, prompt in (
            ("cold", prefix + ids(draw, OWN)),
            ("warm", prefix + ids(draw, OWN)),
            ("lone", ids(draw, OWN)),
        ):
            seconds, outputs = ask(llm, [prompt], 1)
            if trial > 1:
                times[kind].append(seconds * 1e3)
            if kind == "warm":
                cached = outputs[0].num_cached_tokens
    llm.shutdown()
    best = {f"{kind}_ms": statistics.median(values) for kind, values in times.items()}
    return {
        **best,
        "cold_over_warm": best["cold_ms"] / best["warm_ms"],
        "warm_over_lone": best["warm_ms"] / best["lone_ms"],
        "prefix_tokens_lost": PREFIX - cached,
    }


def chats(args: argparse.Namespace) -> dict[str, float]:
    llm, draw = engine(args), random.Random(1)
    system = ids(draw, SYSTEM)
    known = [list(system) for _ in range(USERS)]
    hits = reusable = prompts = 0
    seconds = 0.0
    for turn in range(TURNS):
        asked = [history + ids(draw, QUESTION) for history in known]
        took, outputs = ask(llm, asked, ANSWER)
        seconds += took
        for user, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
            hits += output.num_cached_tokens or 0
            prompts += len(prompt)
            # An answer's last token was never fed. Of the first turn, all but one could share.
            first = SYSTEM if user else 0
            reusable += len(known[user]) - 1 if turn else first
            known[user] = prompt + list(output.outputs[0].token_ids)
    llm.shutdown()
    return {
        "hit_rate": hits / prompts,
        "of_reusable": hits / reusable,
        "output_tok_s": USERS * TURNS * ANSWER / seconds,
    }


def cost(args: argparse.Namespace) -> dict[str, float]:
    found: dict[str, list[float]] = {"on": [], "off": []}
    for kind in ("on", "off", "on", "off"):
        llm, draw = engine(args, enable_prefix_caching=kind == "on"), random.Random(2)
        for trial in range(3):
            prompts = [ids(draw, 512) for _ in range(256)]
            seconds, _ = ask(llm, prompts, 128)
            if trial:
                found[kind].append(256 * 128 / seconds)
        llm.shutdown()
    best = {f"{kind}_tok_s": max(values) for kind, values in found.items()}
    return {**best, "on_over_off": best["on_tok_s"] / best["off_tok_s"]}


def pool(args: argparse.Namespace) -> dict[str, float]:
    work = NAMED["nano"].workload(10_001)
    need = sum(-(-(len(p) + n) // 16) for p, n in zip(work.prompts, work.lengths, strict=True))
    found: dict[str, float] = {"blocks_needed": need}
    for share in (10, 25, 50, 100, None):
        blocks = {} if share is None else {"num_kv_blocks": need * share // 100}
        llm = engine(args, enable_prefix_caching=False, **blocks)
        ask(llm, work.prompts[:32], 16)
        seconds, _ = ask(llm, work.prompts, work.lengths)
        preempted = llm.stats().preemptions
        name = "default" if share is None else f"{share}_percent"
        found[f"{name}_tok_s"] = sum(work.lengths) / seconds
        found[f"{name}_preemptions"] = preempted
        llm.shutdown()
    return found


PARTS = {"ttft": ttft, "chats": chats, "cost": cost, "pool": pool}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append records to this JSONL file")
    args = parser.parse_args()
    for part in args.part or PARTS:
        metrics = PARTS[part](args)
        record = make_record(f"prefix-{part}", metrics, model=args.model.name, device=args.device)
        print_and_append([record], args.out)


if __name__ == "__main__":
    main()
