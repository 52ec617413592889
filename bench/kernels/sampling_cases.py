"""Times sampling at a real vocabulary."""

from __future__ import annotations

import functools

import torch
from attention_cases import Row
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops import LogitRows
from quire.ops.triton.step.sampling import sample, token_logprobs
from quire.runner.hooks.logprobs import WIDTH

VOCAB = 151936 if DEVICE == "cuda" else 5003
Params = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""
KINDS: dict[str, Params] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.6, 0, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.6, 50, 0.9, 0.0),
    "top-p 0.9": (0.6, 0, 0.9, 0.0),
    "min-p 0.05": (0.6, 0, 1.0, 0.05),
}


class Lanes:
    def __init__(self, params: list[Params]) -> None:
        n = len(params)
        self.lanes = torch.randperm(n, device=DEVICE)
        floats = torch.tensor([(p[0], p[2], p[3]) for p in params], device=DEVICE)
        ints = torch.randint(0, 2**31 - 1, (n, 4), dtype=torch.int32, device=DEVICE)
        ints[:, 0] = torch.tensor([p[1] for p in params], dtype=torch.int32, device=DEVICE)
        self.floats, self.ints = torch.empty_like(floats), torch.empty_like(ints)
        self.floats[self.lanes], self.ints[self.lanes] = floats, ints
        self.position = torch.randint(1, 4096, (n,), dtype=torch.int32, device=DEVICE)

    def run(self, logits: Tensor, cut: bool) -> Tensor:
        return sample(
            logits, self.lanes, self.position, temperature=self.floats[:, 0],
            top_p=self.floats[:, 1], min_p=self.floats[:, 2], top_k=self.ints[:, 0],
            seed=self.ints[:, 1:3], sample_index=self.ints[:, 3], truncate_rows=cut,
        )  # fmt: skip


class Logprobs:
    """Rows that ask for equally many alternatives. The kernel writes to `lines`."""

    def __init__(self, rows: int, wanted: int) -> None:
        self.lanes = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.rows = LogitRows(self.lanes, self.lanes, self.lanes, torch.zeros_like(self.lanes))
        self.wanted = torch.full_like(self.lanes, wanted)
        self.tokens = torch.randint(0, VOCAB, (rows,), dtype=torch.int32, device=DEVICE)
        self.lines = torch.zeros(rows, WIDTH, dtype=torch.int32, device=DEVICE)

    def run(self, logits: Tensor) -> None:
        token_logprobs(logits, self.rows, self.tokens, self.wanted, self.lines)


def time_sampling(rows: int) -> Row:
    bytes_ = 4 * rows * VOCAB
    copies = copies_beyond_l2(bytes_, 8)
    logits = 3 * torch.randn(copies, rows, VOCAB, device=DEVICE)
    trials = []
    for name, params in KINDS.items():
        lanes = Lanes([params] * rows)
        cut = params[1] > 0 or params[2] < 1.0 or params[3] > 0.0
        calls = [functools.partial(lanes.run, logits[i], cut) for i in range(copies)]
        trials.append((name, graph_us(calls)))
    for wanted in (0, 5):
        case = Logprobs(rows, wanted)
        calls = [functools.partial(case.run, logits[i]) for i in range(copies)]
        trials.append((f"{wanted} log-probabilities", graph_us(calls)))
    torch_calls = [functools.partial(torch.argmax, logits[i], -1) for i in range(copies)]
    baseline = f"torch argmax {graph_us(torch_calls):.1f} µs"
    rate = bytes_ / trials[1][1] / 1e6
    unit = "TB/s (temperature)"
    return Row("sampling", f"V {VOCAB}", str(rows), rate, unit, tuple(trials), baseline)
