"""Sampling kernels against the runner's own sampler, noise included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.ops.triton.sampling import sample, token_logprobs
from quire.runner.sampling import random, truncate
from tests.slow import slow

VOCAB = 5003

# temperature, top_k, top_p, min_p
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 20, 0.5, 0.1),
    (1.0, 0, 0.01, 0.0),
    (0.8, 4000, 0.7, 0.0),
    (1.0, VOCAB, 1.0, 0.0),
    (1.0, 9999999, 0.95, 0.001),
]


class Lanes:
    """Parameters in tables of more lanes than rows, as the runner keeps them."""

    def __init__(self, rows: list[tuple[float, int, float, float]], device: str) -> None:
        n = len(rows)
        make = torch.Generator().manual_seed(1)
        self.lanes = (torch.randperm(n + 4, generator=make)[:n]).to(device)
        self.floats = torch.zeros(n + 4, 6, device=device)
        self.ints = torch.randint(-(2**31), 2**31, (n + 4, 4), generator=make).int().to(device)
        self.floats[self.lanes, :3] = torch.tensor([(r[0], r[2], r[3]) for r in rows]).to(device)
        self.ints[self.lanes, 0] = torch.tensor([r[1] for r in rows]).int().to(device)
        self.ints[:, 3] = self.ints[:, 3] & 127
        self.position = torch.arange(n, dtype=torch.int32, device=device) * 97 + 3

    def run(self, logits: Tensor, lanes: Tensor | None = None, **keywords: int | bool) -> Tensor:
        return sample(
            logits, self.lanes if lanes is None else lanes, self.position,
            temperature=self.floats[:, 0], top_p=self.floats[:, 1], min_p=self.floats[:, 2],
            top_k=self.ints[:, 0], seed=self.ints[:, 1:3], sample_index=self.ints[:, 3],
            **keywords,  # type: ignore[arg-type]
        )  # fmt: skip

    def scores(self, logits: Tensor) -> Tensor:
        """What the runner's sampler takes the maximum of; float32 [N, V]."""
        floats, ints = self.floats[self.lanes], self.ints[self.lanes]
        greedy = floats[:, 0:1] == 0
        x = logits.float() / torch.where(greedy, 1.0, floats[:, 0:1])
        cut = truncate.min_p(x, floats[:, 2])
        cut = truncate.top_k_top_p(cut, ints[:, 0], floats[:, 1])
        noise = random.gumbel(ints[:, 1:3], ints[:, 3], self.position, logits.shape[1])
        return torch.where(greedy, x, cut + noise)


def check(tokens: Tensor, scores: Tensor) -> None:
    """Each token's score is the best, but for the rounding of two different logarithms."""
    own = scores.gather(1, tokens.long()[:, None])[:, 0]
    best = scores.amax(1)
    assert ((own == best) | (best - own <= 2e-5 * (1 + best.abs()))).all(), (best - own).tolist()


@pytest.mark.parametrize(
    ("spread", "dtype"),
    [
        *((0.05, torch.float32), (3.0, torch.bfloat16)),
        *(slow(0.05, torch.bfloat16), slow(3.0, torch.float32)),
    ],
)
def test_sample(kernel_device: str, dtype: torch.dtype, spread: float) -> None:
    """A spread near nothing makes rows too flat to collect, which takes the other road."""
    make = torch.Generator().manual_seed(2)
    logits = (spread * torch.randn(len(ROWS), VOCAB, generator=make)).to(dtype).to(kernel_device)
    case = Lanes(ROWS, kernel_device)
    check(case.run(logits, cap=256), case.scores(logits))


def test_sample_without_truncation(kernel_device: str) -> None:
    rows = ROWS[:3]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)).to(kernel_device)
    case = Lanes(rows, kernel_device)
    check(case.run(logits, truncate=False), case.scores(logits))


def test_masked_entries_and_padding(kernel_device: str) -> None:
    case = Lanes(ROWS, kernel_device)
    logits = torch.full((len(ROWS), VOCAB), -math.inf, device=kernel_device)
    allowed = torch.arange(len(ROWS), device=kernel_device) * 311 + 7
    logits[torch.arange(len(ROWS)), allowed] = -50.0
    lanes = case.lanes.clone()
    lanes[2] = -1
    tokens = case.run(logits, lanes, cap=128)
    real = lanes >= 0
    assert torch.equal(tokens[real].long(), allowed[real])


def test_rows_do_not_depend_on_each_other(kernel_device: str) -> None:
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(4))
    logits = logits.to(kernel_device)
    case = Lanes(ROWS, kernel_device)
    together = case.run(logits, cap=128)
    case.position, case.lanes = case.position[3:7], case.lanes[3:7]
    assert torch.equal(case.run(logits[3:7], cap=128), together[3:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs(kernel_device: str, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(6, VOCAB, generator=make)).to(dtype).to(kernel_device)
    logits[3, 100:200] = -math.inf
    tokens = torch.tensor([0, VOCAB - 1, 77, 5, 2048, -1], dtype=torch.int32, device=kernel_device)
    values, ranks = token_logprobs(logits, tokens)
    want = logits.double().log_softmax(-1)
    own = want.gather(1, tokens.clamp(min=0).long()[:, None])
    torch.testing.assert_close(values[:5].double(), own[:5, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(ranks[:5].long(), ((want > own).sum(-1) + 1)[:5])
