"""Shares a model out over ranks: within each layer, and by layers. The tokens stay the same.

    python -m lessons.10_parallelism.lesson

1. Tensor parallelism by hand: one MLP, its first product cut by outputs, its second by inputs.
2. What a rank of the engine holds: its parameters, and its KV of a token.
3. Two ranks of the engine, two processes that sum by gloo, write what one rank writes.
4. Pipeline parallelism: stages of layers, and groups of requests that take turns in them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams
from quire.models import Decoder, build_model
from quire.parallel import SingleGroup
from quire.tools.quantize.layer import Sequences

PROMPTS = ("Once upon a time", "The little dog", "One day, a girl", "Tom and his friend")
LAYER = "model.layers.0.mlp"


@dataclass
class Rank(SingleGroup):
    """A rank that only says which it is: enough to build its share of a model."""

    rank: int
    world: int


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def by_hand(loaded: Loaded) -> None:
    """Cuts a layer over ranks. Gate and up give each rank a part of the inner width, which is all
    that its rows of `down` need: nothing is sent in between, and there is one sum at the end."""
    names = [f"{LAYER}.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (loaded.weights[name] for name in names)
    x = torch.randn(5, gate.shape[1], generator=torch.Generator().manual_seed(0))
    whole, rows = mlp(x, gate, up, down), []
    for world in (2, 4):
        shares = zip(gate.chunk(world), up.chunk(world), down.chunk(world, dim=1), strict=True)
        partial = [mlp(x, *share) for share in shares]
        error = float((torch.stack(partial).sum(0) - whole).abs().max() / whole.abs().max())
        alone = float((partial[0] - whole).abs().max() / whole.abs().max())
        rows.append([world, gate.shape[0] // world, f"{error:.0e}", f"{alone:.1f}"])
        check(error < 1e-4 < alone, f"{world} ranks: the sum is the layer, one share is not")
    print(table(["ranks", "inner width of each", "error of the sum", "of one share"], rows))


def shares(loaded: Loaded) -> None:
    """Builds the shares of ranks without memory, and adds up what each holds."""
    rows = []
    for world in (1, 2, 4):
        model = build_model(loaded.spec, device="meta", dtype=torch.float32, group=Rank(0, world))
        count = sum(parameter.numel() for parameter in model.layers.parameters())
        rows.append(
            [world, count, model.kv_groups(1)[0].block_bytes, 2 * len(model.layers) * (world > 1)]
        )
    check(rows[1][1] < 0.51 * rows[0][1], "of two ranks each holds half of the layers' parameters")
    check(2 * rows[1][2] == rows[0][2], "and half of the KV")
    headers = ["ranks", "parameters of layers", "KV bytes of a token", "sums in a step"]
    print(table(headers, rows))


def engine(loaded: Loaded, **ranks: int) -> list[list[int]]:
    """Returns what the engine writes with so many ranks, greedily."""
    llm = LLM(str(loaded.path), device="cpu", kv_cache_gb=0.1, **ranks)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def pipeline(decoder: Decoder, texts: list[Tensor], stages: int, steps: int) -> list[str]:
    """Makes `steps` tokens for each group of texts, int32 [n, length], which grow. In a tick, each
    stage computes the group that has waited longest for it, and passes its hidden states on.
    Returns what each stage did: a character for each tick, the group's number or a dot."""
    layers: list[Any] = list(decoder.layers)
    share, longest = -(-len(layers) // stages), texts[0].shape[1] + steps
    waiting = [deque(range(len(texts))), *(deque[int]() for _ in range(stages - 1))]
    done, states = [""] * stages, [torch.empty(0)] * len(texts)
    while any(waiting):
        moved = [queue.popleft() if queue else None for queue in waiting]
        for stage, group in enumerate(moved):
            done[stage] += "." if group is None else str(group)
            if group is None:
                continue
            ids = texts[group]
            if stage == 0:
                states[group] = decoder.embedding(ids.flatten()).view(*ids.shape, -1)
            sequences = Sequences(layers[0], ids.shape[1], decoder.device, decoder.dtype)
            for block in layers[share * stage : share * (stage + 1)]:
                sequences.run(block, states[group])
            if stage + 1 == stages:
                logits = decoder.logits(decoder.norm(states[group][:, -1].contiguous()))
                texts[group] = torch.cat([ids, logits.argmax(-1, keepdim=True).int()], dim=1)
            if texts[group].shape[1] < longest:
                waiting[(stage + 1) % stages].append(group)
    return done


def stages(loaded: Loaded, steps: int) -> None:
    """Runs the schedule with one group and with as many as stages."""
    prompts = torch.tensor([loaded.tokenizer.encode(each)[:3].tolist() for each in PROMPTS])
    expected, rows = torch.empty(0), list[list[Any]]()
    for count, groups in ((1, 1), (4, 1), (4, 4)):
        texts = list(prompts.int().chunk(groups))
        done = pipeline(loaded.decoder, texts, count, steps)
        expected = torch.cat(texts) if not rows else expected
        busy = sum(len(each) - each.count(".") for each in done) / sum(map(len, done))
        ticks = max(groups, count) * steps + min(groups, count) - 1
        rows.append([count, groups, f"{busy:.0%}", " ".join(each[:10] for each in done)])
        check(
            torch.equal(torch.cat(texts), expected), f"{count} stages, {groups} groups: same tokens"
        )
        check(
            busy == groups * steps / ticks, f"stages are busy {busy:.0%} of the time, as predicted"
        )
    print(table(["stages", "groups", "busy", "the first ticks of each stage"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--stages", action="store_true", help="also run the engine's own stages")
    args = options.parse_args(arguments)
    loaded = load(args)
    by_hand(loaded)
    shares(loaded)
    alone = engine(loaded)
    check(engine(loaded, tensor_parallel_size=2) == alone, "two ranks write what one writes")
    stages(loaded, 3)
    if args.stages:
        check(engine(loaded, pipeline_parallel_size=2) == alone, "so do two stages of the engine")


if __name__ == "__main__":
    main(sys.argv[1:])
