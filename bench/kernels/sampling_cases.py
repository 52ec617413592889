"""Checks sampling against its twins, and times it at a real vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from attention_cases import Row
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops import LogitRows, StepRows
from quire.ops.reference import random, truncate
from quire.ops.triton.step.sampling import sample, token_logprobs
from quire.ops.triton.step.step import expand_rows
from quire.runner.hooks.logprobs import WIDTH
from quire.sampling_params import MAX_LOGPROBS

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

    def error(self, logits: Tensor, cut: bool) -> float:
        """Returns how much worse the worst token's score is than the best, in 2e-5 of that."""
        floats, ints = self.floats[self.lanes], self.ints[self.lanes]
        greedy = floats[:, 0:1] == 0
        x = logits.float() / torch.where(greedy, 1.0, floats[:, 0:1])
        kept = truncate.top_k_top_p(truncate.min_p(x, floats[:, 2]), ints[:, 0], floats[:, 1])
        noise = random.gumbel(ints[:, 1:3], ints[:, 3], self.position, logits.shape[1])
        scores = torch.where(greedy, x, kept + noise)
        own = scores.gather(1, self.run(logits, cut).long()[:, None])[:, 0]
        best = scores.amax(1)
        # Infinities meet where the noise of the same entry is infinite on both sides.
        behind = torch.where(own == best, 0.0, best - own)
        return float((behind / (2e-5 * (1 + best.abs()))).max())


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


def logprob_error(spread: float, wanted: int) -> float:
    logits = spread * torch.randn(9, VOCAB, device=DEVICE)
    case = Logprobs(9, wanted)
    case.run(logits)
    exact = logits.double().log_softmax(-1)
    own = logits.gather(1, case.tokens.long()[:, None])
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :wanted]
    ids = torch.cat([case.tokens.long()[:, None], best], dim=1)
    wrong = int((case.lines[:, 1] != (logits > own).sum(-1) + 1).sum())
    wrong += int((case.lines[:, 2 : 3 + wanted] != ids).sum())
    first = 3 + MAX_LOGPROBS
    values = case.lines[:, first : first + 1 + wanted].contiguous().view(torch.float32)
    return float((values.double() - exact.gather(1, ids)).abs().max()) / 2e-5 + wrong


def expand_error() -> float:
    """1 for any difference from plain indexing."""
    lanes = torch.tensor([4, 0, 2, -1], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 2400, 2405, 2405], dtype=torch.int32, device=DEVICE)
    logit_start = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32, device=DEVICE)
    flags = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    first = torch.tensor([0, 9, 70, 9, 900], dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 9999, (5, 4096), dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 999, (5, 256), dtype=torch.int32, device=DEVICE)
    asked = LogitRows(*torch.full((4, 4), 9, dtype=torch.int32, device=DEVICE))
    found = expand_rows(
        StepRows(lanes, starts, logit_start, flags), first, tokens, [(table, 16)], asked,
        num_tokens=2410, max_seq_len=4096,
    )  # fmt: skip
    slots = found.groups[0].slots
    good = bool((slots[2405:] == -1).all()) and int(found.seq_lens[3]) == 0
    good &= asked.lanes.tolist() == [4, 2, -1, -1]
    good &= asked.tokens[:2].tolist() == [0, 2404]
    good &= asked.lengths[:2].tolist() == [901, 75]
    for row, lane, begin, end in ((0, 4, 0, 1), (1, 0, 1, 2400), (2, 2, 2400, 2405)):
        place = int(first[lane]) + torch.arange(end - begin, device=DEVICE)
        good &= torch.equal(found.ids[begin:end], tokens[lane, place])
        good &= torch.equal(found.positions[begin:end].long(), place)
        good &= torch.equal(slots[begin:end], table[lane, place // 16].long() * 16 + place % 16)
        good &= int(found.seq_lens[row]) == int(first[lane]) + end - begin
    return 0.0 if good else float("inf")


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    def error(spread: float, cut: bool, dtype: torch.dtype) -> float:
        kinds = list(KINDS.values()) if cut else list(KINDS.values())[:2]
        params = kinds * (8 if DEVICE == "cuda" else 1)
        logits = (spread * torch.randn(len(params), VOCAB, device=DEVICE)).to(dtype)
        return Lanes(params).error(logits, cut)

    for dtype in (torch.float32, torch.bfloat16):
        yield f"sample, {dtype}", functools.partial(error, 3.0, True, dtype)
        yield f"sample, no truncation, {dtype}", functools.partial(error, 3.0, False, dtype)
    yield "sample, flat rows", functools.partial(error, 0.05, True, torch.float32)
    for wanted in (0, 5, 100):
        yield f"{wanted} log-probabilities", functools.partial(logprob_error, 3.0, wanted)
    yield "log-probabilities, flat rows", functools.partial(logprob_error, 0.01, 5)
    yield "expansion of rows", expand_error


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
