"""Ranks of the reader's engine: a layer's shares by hand, then two processes."""

from __future__ import annotations

import importlib
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lessons import mine
from lessons.__main__ import use
from lessons.common import Loaded, check, own_model, table

LAYER = "model.layers.0.mlp"


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
        rows.append((world, gate.shape[0] // world, error, alone))
    print(table(["ranks", "inner width of each", "error of the sum", "of one share"], rows))
    for world, _, error, alone in rows:
        check(error < 1e-4 < alone, f"{world} ranks: the sum is the layer, one share is not")
    print()


def rank_texts(job: tuple[int, int, str, Path, str, list[list[int]]]) -> list[list[int]]:
    """Runs the reader's engine as one rank of several. Returns what it writes, greedily."""
    rank, world, meeting, folder, file, prompts = job
    use(file)
    engine_file = importlib.import_module("lessons.mine")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    model = engine_file.Shard(folder, rank, world)
    core = engine_file.Engine(model, engine_file.PagedCache(model, count=32))
    requests = [engine_file.Request(str(i), ids, len(ids) + 8) for i, ids in enumerate(prompts)]
    for request in requests:
        core.add(request)
    core.run()
    dist.destroy_process_group()
    return [request.tokens[-8:] for request in requests]


def own_ranks(loaded: Loaded, texts: list[str], alone: list[list[int]]) -> None:
    """Runs the reader's engine on two ranks, in two processes that sum by gloo."""
    prompts, own = [loaded.tokenizer.encode(each).tolist() for each in texts], own_model(loaded)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, get_context("spawn")) as pool,
    ):
        jobs = [(rank, 2, f"file://{folder}/ranks", loaded.path, str(mine.__file__), prompts)
                for rank in range(2)]  # fmt: skip
        written = list(pool.map(rank_texts, jobs))
    rows = list[list[Any]]()
    for rank in range(2):
        share = mine.Shard(loaded.path, rank, 2)
        weights = sum(w.numel() for name, w in share.w.items() if "_proj" in name)
        rows.append(
            [rank, weights, share.kv_heads, repr(loaded.tokenizer.hub.decode(written[rank][0]))]
        )
    print(table(["my rank", "weights of layers", "KV heads", "a text"], rows))
    whole = sum(w.numel() for name, w in own.w.items() if "_proj" in name)
    check(rows[0][1] + rows[1][1] == whole, f"together they have the {whole:,} weights once")
    check(
        written[0] == written[1] == alone, "my two ranks write what Quire's engine writes alone\n"
    )
