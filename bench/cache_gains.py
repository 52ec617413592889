"""Measures what the prefix cache and the host tier gain, and what they cost.

    python bench/cache_gains.py bench/configs/qwen2.5-1.5b                    # a GPU, all parts
    python bench/cache_gains.py --device cpu --part tier --part crowd         # the embedded model

A folder that holds only a config.json gets random weights.

Parts:

ttft        Time to the first token of 64 tokens after a prefix of 2083 tokens. The prefix is new
            (cold), cached (warm) or left out (lone).

chats       Users with one system prompt hold conversations of several turns. Reused tokens as a
            share of all reusable tokens.

cost        Requests without a common prefix, with the cache on and off.

pool        Throughput by the number of KV blocks, as a share of the load's peak need.

tier        Questions in random order about documents, three times as large as the device's pool.
            Requests per second with a host tier over those without.

tier-chats  The same with conversations. A question and an answer are added in each turn.

crowd       Output tokens per second with twice as many requests in flight as the pool holds, over
            those of a load that fits. Without a host tier and with one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.tools.bench.cases import NAMED
from quire.tools.bench.record import make_record
from tables import print_and_append

PREFIX, OWN = 2083, 64
USERS, TURNS, SYSTEM, QUESTION, ANSWER = 64, 8, 1500, 50, 60
BLOCK = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads that need more KV than the pool holds.

    Attributes:
        documents, document: how many, and their tokens.
        own, answer: tokens of a question and of an answer.
        questions: asked about all documents together.
        streams: requests in flight.
        over: the documents' tokens over the pool's.
        tier_gb: size of the host tier.
        fitting: requests whose KV fits the pool in `crowd`, with `prompt` and `output` tokens.
    """

    documents: int
    document: int
    own: int
    answer: int
    questions: int
    streams: int
    tier_gb: float
    fitting: int
    prompt: int
    output: int
    over: float = 3.0


SMALL = Sizes(24, 256, 16, 8, 96, 4, 0.5, 8, 64, 64)
BIG = Sizes(48, 4096, 64, 32, 384, 16, 12.0, 64, 512, 512)
REPEATS = 3


def engine(args: argparse.Namespace, **settings: Any) -> LLM:
    stored = args.model is None or any(args.model.glob("*.safetensors"))
    settings = {"device": args.device, "load_format": "auto" if stored else "dummy", **settings}
    model = None if args.model is None else str(args.model)
    return LLM(model, skip_tokenizer_init=True, **settings)


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


def tier(args: argparse.Namespace, grows: bool) -> dict[str, float]:
    """Asks about documents, or continues conversations, with a host tier and without."""
    sizes: Sizes = args.sizes
    turns = sizes.questions // sizes.documents
    longest = sizes.document + (turns + 1 if grows else 1) * (sizes.own + sizes.answer)
    pool = int(sizes.documents * sizes.document / sizes.over / BLOCK)
    found: dict[str, float] = {}
    for kind, size in (("off", 0.0), ("on", sizes.tier_gb)):
        draw = random.Random(3)
        texts = [ids(draw, sizes.document) for _ in range(sizes.documents)]
        llm = engine(
            args, max_num_seqs=sizes.streams, max_model_len=longest, block_size=BLOCK,
            num_kv_blocks=max(pool, -(-longest // BLOCK)), host_cache_gb=size,
        )  # fmt: skip
        seconds, hits, prompts = 0.0, 0, 0
        for turn in range(turns + 1):
            order = list(range(sizes.documents))
            if turn and not grows:
                order = draw.choices(order, k=sizes.documents)
            draw.shuffle(order)
            asked = [texts[i] + ids(draw, sizes.own) for i in order]
            took, outputs = ask(llm, asked, sizes.answer)
            if turn:  # the first turn fills the cache
                seconds += took
                hits += sum(output.num_cached_tokens or 0 for output in outputs)
                prompts += sum(map(len, asked))
            for i, prompt, output in zip(order, asked, outputs, strict=True) if grows else ():
                texts[i] = prompt + list(output.outputs[0].token_ids)
        found[f"{kind}_requests_s"] = turns * sizes.documents / seconds
        found[f"{kind}_hit_rate"] = hits / prompts
        llm.shutdown()
    return {**found, "on_over_off": found["on_requests_s"] / found["off_requests_s"]}


def crowd(args: argparse.Namespace) -> dict[str, float]:
    """Runs a load that fits the pool, and in turn the same with twice the requests in flight."""
    sizes: Sizes = args.sizes
    longest = (sizes.prompt + sizes.output) * 5 // 4 + 1
    pool = max(sizes.fitting * -(-(sizes.prompt + sizes.output) // BLOCK), -(-longest // BLOCK))
    found: dict[str, float] = {}
    for kind, size in (("recompute", 0.0), ("swap", sizes.tier_gb)):
        fitting, crowded = (
            engine(
                args, max_num_seqs=inside, max_model_len=longest, block_size=BLOCK,
                num_kv_blocks=pool, host_cache_gb=size,
            )
            for inside in (sizes.fitting, 2 * sizes.fitting)
        )  # fmt: skip
        draw, rates, ratios = random.Random(4), list[float](), list[float]()
        for repeat in range(REPEATS + 1):
            count = (12 if repeat else 2) * sizes.fitting  # the first repeat warms up
            prompts = [ids(draw, about(draw, sizes.prompt)) for _ in range(count)]
            lengths = [about(draw, sizes.output) for _ in range(count)]
            alone, _ = ask(fitting, prompts, lengths)
            seconds, _ = ask(crowded, prompts, lengths)
            if repeat:
                rates.append(sum(lengths) / seconds)
                ratios.append(alone / seconds)
        stats = crowded.stats()
        fitting.shutdown()
        crowded.shutdown()
        found[f"{kind}_tok_s"] = statistics.median(rates)
        found[f"{kind}_ratio"] = statistics.median(ratios)
        found[f"{kind}_preemptions"] = stats.preemptions
        found[f"{kind}_swapped"] = stats.swapped
    return found


def about(draw: random.Random, mean: int) -> int:
    """Returns a length within a quarter of the mean, so that requests end at different times."""
    return draw.randint(mean * 3 // 4, mean * 5 // 4)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "ttft": ttft, "chats": chats, "cost": cost, "pool": pool,
    "tier": partial(tier, grows=False), "tier-chats": partial(tier, grows=True), "crowd": crowd,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="default: the embedded model")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--device", default="cuda", help="a CPU gets smaller loads")
    parser.add_argument("--out", type=Path, help="append records to this JSONL file")
    args = parser.parse_args()
    args.sizes = SMALL if args.device == "cpu" else BIG
    name = "quire-tiny" if args.model is None else args.model.name
    for part in args.part or PARTS:
        record = make_record(f"cache-{part}", PARTS[part](args), model=name, device=args.device)
        print_and_append([record], args.out)


if __name__ == "__main__":
    main()
