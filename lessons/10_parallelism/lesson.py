"""Shares a model out over ranks: within each layer, and by layers. The tokens stay the same.

    python -m lessons 10 [--mine FILE]

1. Tensor parallelism by hand: one MLP, its first product cut by outputs, its second by inputs.
2. Two ranks of your engine, two processes that sum by gloo, write what one rank writes.
3. Pipeline parallelism: stages of layers, and groups of requests that take turns in them.
4. Two ranks of Quire's engine: what each holds, and what they write.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lessons import mine
from lessons.common import Loaded, check, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.models import build_model
from quire.parallel import SingleGroup

PROMPTS = ("Once upon a time", "The little dog", "One day, a girl", "Tom and his friend")


@dataclass
class Rank(SingleGroup):
    """A rank that only says which it is: enough to build its share of a model."""

    rank: int
    world: int


def stages(loaded: Loaded, steps: int) -> None:
    """Runs the reader's pipeline with one group, and with as many as stages."""
    model = own_model(loaded)
    prompts = [loaded.tokenizer.encode(each)[:3].tolist() for each in PROMPTS]
    expected = [each + mine.generate_cached(model, each, steps, mine.greedy) for each in prompts]
    rows, same, predicted = list[list[Any]](), [], []
    for count, groups in ((1, 1), (4, 1), (4, 4)):
        texts = [list(each) for each in prompts[:groups]]
        done = mine.pipeline(model, texts, count, steps)
        busy = sum(len(each) - each.count(".") for each in done) / sum(map(len, done))
        ticks = max(groups, count) * steps + min(groups, count) - 1
        same.append(texts == expected[:groups])
        predicted.append(busy == groups * steps / ticks)
        rows.append([count, groups, f"{busy:.0%}", " ".join(each[:10] for each in done)])
    print(table(["stages", "groups", "busy", "the first ticks of each stage"], rows))
    check(all(same), "stages and groups change no token")
    check(all(predicted), "stages are busy as long as predicted")


def shares(loaded: Loaded) -> None:
    """Builds the shares of ranks without memory, and adds up what each holds."""
    rows = []
    for world in (1, 2, 4):
        model = build_model(loaded.spec, device="meta", dtype=torch.float32, group=Rank(0, world))
        count = sum(parameter.numel() for parameter in model.layers.parameters())
        rows.append(
            [world, count, model.kv_groups(1)[0].block_bytes, 2 * len(model.layers) * (world > 1)]
        )
    headers = ["ranks of Quire", "parameters of layers", "KV bytes of a token", "sums in a step"]
    print(table(headers, rows))
    check(rows[1][1] < 0.51 * rows[0][1], "of two ranks each holds half of the layers' parameters")
    check(2 * rows[1][2] == rows[0][2], "and half of the KV\n")


def engine(loaded: Loaded, **ranks: int) -> list[list[int]]:
    """Returns what the engine writes with so many ranks, greedily."""
    llm = LLM(str(loaded.path), device="cpu", kv_cache_gb=0.1, **ranks)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--stages", action="store_true", help="also run the engine's own stages")
    args = options.parse_args(arguments)
    loaded = load(args)
    alone = engine(loaded)
    ranks = importlib.import_module("lessons.10_parallelism.ranks")
    ranks.by_hand(loaded)
    ranks.own_ranks(loaded, list(PROMPTS), alone)
    stages(loaded, 3)
    shares(loaded)
    check(engine(loaded, tensor_parallel_size=2) == alone, "two ranks of Quire write the same")
    if args.stages:
        check(engine(loaded, pipeline_parallel_size=2) == alone, "so do two stages of it")


if __name__ == "__main__":
    main(sys.argv[1:])
