"""Steps in two halves give the same results as whole steps, with two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import QuireError
from quire.layers.async_tp import HalvesGroup, first_half, split_batch
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.models import build_model, load_config, load_weights, spec_from_config
from quire.ops import Policy, use_policy
from quire.parallel import ProcessGroup
from quire.parallel.torch_group import TorchGroup
from tests.gloo_ranks import on_ranks
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.slow import some

PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23, 8, 1, 4, 110, 77], [11], [30, 31, 32, 33, 34]]
CASES = [
    "qwen3-tied-bias", "qwen3-moe", "llama-mqa-tied", "gpt2", "gpt-oss", "glm", "llama-biases",
    "minimax-m2", "mistral-window", "mixtral", "ministral3", "phi3", "qwen2-window",
    "qwen3-window", "seed-oss", "smollm3-window",
]  # fmt: skip
"""Families whose layers are two parts that each end with a sum. Some have two KV groups, others
sums within attention."""


class CountingGroup(HalvesGroup):
    """Counts the turns between halves."""

    turns = 0

    def turn(self, half: int) -> None:
        self.turns += 1
        super().turn(half)


def logits_of(folder: Path, group: TorchGroup, deterministic: bool) -> list[Tensor]:
    """Returns logits of steps that mix chunks of prompts, single tokens and padding."""
    spec = spec_from_config(load_config(folder))
    model = build_model(spec, device="cpu", dtype=torch.float32, group=group)
    load_weights(model, folder, "auto")
    harness = Harness(model, padding=3)
    first, second, third = (harness.add(prompt) for prompt in PROMPTS)
    steps = [[(first, 9)], [(second, 1), (first, 1), (third, 4)], [(first, 4), (third, 1)]]
    with use_policy(Policy(deterministic=deterministic)):
        return [logits for rows in steps for logits in harness.step(rows)]


def _far(folders: list[Path], plain: ProcessGroup) -> tuple[list[Any], list[int]]:
    """Returns the largest difference between logits of halves and of whole steps, and the number of
    turns."""
    device = torch.device("cpu")
    far, turns = [], []
    for index, folder in enumerate(folders):
        halves = CountingGroup(plain, 2, device)
        # The first two also to the bit.
        for deterministic in (False, True)[: 2 if index < 2 else 1]:
            whole = logits_of(folder, plain, deterministic)
            cut = logits_of(folder, halves, deterministic)
            pairs = zip(whole, cut, strict=True)
            off = max(float((a - b).abs().max()) for a, b in pairs)
            far.append((folder.name, deterministic, off, float(whole[0].std())))
        turns.append(halves.turns)
    return far, turns


def test_halves_give_the_logits_of_whole_steps(tmp_path: Path) -> None:
    folders = [tmp_path / case for case in some(CASES)]
    for folder in folders:
        make(folder, folder.name)
    found = on_ranks(_far, folders, tmp_path)
    for far, turns in found:
        # Three steps of layers, each of two parts, for two halves.
        assert all(count % (3 * 2 * 2) == 0 and count for count in turns)
        for case, deterministic, off, spread in far:
            assert off <= (0.0 if deterministic else 1e-4 * max(1.0, spread)), case
            assert spread > 1e-3


def test_halves_of_a_batch() -> None:
    """A row in the first half, one that is cut, one in the second, one of padding."""
    tokens = torch.arange(12, dtype=torch.int32)
    table = torch.zeros(4, 3, dtype=torch.int32)
    batch = ForwardBatch(
        input_ids=tokens,
        positions=tokens + 100,
        query_start=torch.tensor([0, 2, 9, 10, 10], dtype=torch.int32),
        seq_lens=torch.tensor([5, 20, 1, 0], dtype=torch.int32),
        groups=(GroupBatch(tokens.long() + 50, table, {"of": "a whole step"}),),
        q_lens=(2, 7, 1, 0),
        max_q_len=7,
        max_seq_len=20,
    )
    first, second = split_batch(batch, 6)
    assert first.query_start.tolist() == [0, 2, 6, 6, 6]
    assert second.query_start.tolist() == [0, 0, 3, 4, 4]
    assert first.seq_lens.tolist() == [5, 17, 0, 0]
    assert second.seq_lens.tolist() == [0, 20, 1, 0]
    assert (first.q_lens, second.q_lens) == ((2, 4, 0, 0), (0, 3, 1, 0))
    assert (first.max_q_len, second.max_q_len) == (6, 6)
    assert first.seq_lens.dtype == second.query_start.dtype == torch.int32
    for name in ("input_ids", "positions"):
        halves = getattr(first, name), getattr(second, name)
        assert torch.equal(torch.cat(halves), getattr(batch, name))
    slots = [half.groups[0].slots for half in (first, second)]
    assert torch.equal(torch.cat(slots), batch.groups[0].slots)
    assert all(half.groups[0].scratch == {} for half in (first, second))


@pytest.mark.parametrize(
    ("tokens", "first"), [(2, 1), (17, 8), (127, 63), (128, 64), (300, 128), (8192, 4096)]
)
def test_the_first_half(tokens: int, first: int) -> None:
    assert first_half(tokens) == first
    assert first <= tokens - first <= tokens // 2 + 64


class _Inner:
    """A group of two ranks whose sums are the first rank's values."""

    handle, rank, world = None, 0, 2

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        return x if residual is None else x + residual


class _Exchange:
    """Records the buffers in which sums are sent and collected."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def takes(self, x: Tensor, residual: Tensor) -> bool:
        return len(x) < 5

    def send(self, slot: int, x: Tensor) -> None:
        self.seen.append(f"send {slot}")

    def collect(self, slot: int, x: Tensor, residual: Tensor, out: Tensor, name: str) -> None:
        self.seen.append(f"collect {slot} {name}")
        torch.add(x, residual, out=out)


def test_halves_alternate_between_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves alternate between their own buffers; other sums use the inner group."""
    monkeypatch.setattr(dist, "get_rank", lambda handle: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda handle: 2)
    exchange, x = _Exchange(), torch.ones(3, 2)
    group = HalvesGroup(_Inner(), 4, torch.device("cpu"), exchange)  # type: ignore[arg-type]
    for _ in range(2):
        with group.halves():
            for _ in range(2):
                for half in (0, 1):
                    group.turn(half)
                    assert torch.equal(group.all_reduce(x, x, "a"), 2 * x)
                    assert torch.equal(group.all_reduce(x), x)
                    large = torch.ones(6, 2)
                    assert torch.equal(group.all_reduce(large, large, "b"), 2 * large)
    places = [0, 2, 1, 3] * 2
    assert exchange.seen == [each for i in places for each in (f"send {i}", f"collect {i} a")]
    assert group.all_reduce(x, x).sum() == 12
    with pytest.raises(QuireError, match="even"):
        _lone_sum(group, x)


def _lone_sum(group: HalvesGroup, x: Tensor) -> None:
    with group.halves():
        group.turn(1)
        group.all_reduce(x, x)
