"""The sampler against float64 oracles, and statistics of its draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.arrays import int32
from quire.ops import LogitRows, StepRows
from quire.ops.reference import random, token_logprobs, truncate
from quire.plan import Admit, KVGroup, StepPlan, StopReason
from quire.runner.hooks import HeadContext, Level
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.logprobs import WIDTH, unpack
from quire.runner.hooks.penalties import Penalties
from quire.runner.hooks.sampling import Sampling
from quire.runner.readback import PinnedRing, Upload
from quire.runner.state import BatchState, Limits
from quire.sampling_params import SamplingParams

VOCAB = 97
EOS = 7


class Head:
    """The sampler's hooks, with a state whose lane i has `tokens[i]` and `params[i]`."""

    def __init__(
        self,
        params: list[SamplingParams],
        tokens: list[list[int]],
        prompt_len: int = 2,
        seed: int = 1,
        rows: int = 0,
    ) -> None:
        device = torch.device("cpu")
        lanes = len(params)
        limits = Limits(lanes=lanes, tokens=64, logit_rows=max(lanes, rows), length=64)
        self.penalties = Penalties(VOCAB)
        self.hooks = (self.penalties, Sampling(), Acceptance((EOS,), self.penalties))
        columns = [column for hook in self.hooks for column in hook.columns(limits)]
        self.state = state = BatchState(limits, (KVGroup(layers=(0,)),), device, columns)
        none = int32([])
        admits = [
            Admit(i, 0, str(i), int32(tokens[i]), prompt_len, 0, 64, p, seed + i)
            for i, p in enumerate(params)
        ]
        plan = StepPlan(0, none, none, none, none, admits=admits)
        upload = Upload(PinnedRing(device, 2), state.memory)
        for hook in self.hooks:
            hook.bind(state)
            hook.stage(plan, upload)
        upload.send()
        for lane, admit in enumerate(admits):
            state.tokens[lane, : len(tokens[lane])] = torch.tensor(tokens[lane]).int()
            state.min_total[lane] = prompt_len + admit.params.min_tokens
            state.max_total[lane] = 64

    def context(self, logits: torch.Tensor, lanes: list[int], lengths: list[int]) -> HeadContext:
        count = len(lanes)
        own, places = torch.tensor(lanes).int(), torch.tensor(lengths).int()
        starts = torch.arange(count + 1).int()
        return HeadContext(
            level=Level.FULL,
            state=self.state,
            rows=StepRows(own, starts, starts, torch.zeros_like(own)),
            logit_rows=LogitRows(own, starts[:-1], places, torch.zeros_like(own)),
            last=logits,
            held=logits,
            raw=logits,
            logits=logits,
        )

    def sample(
        self, logits: torch.Tensor, length: int, lanes: list[int] | None = None
    ) -> torch.Tensor:
        """Draws a token for each lane, and finishes their rows."""
        lanes = list(range(len(logits))) if lanes is None else lanes
        ctx = self.context(logits, lanes, [length] * len(lanes))
        for hook in self.hooks:
            hook.logits(ctx)
        for hook in self.hooks:
            hook.tokens(ctx)
        assert ctx.tokens is not None
        return ctx.tokens

    def reasons(self, tokens: list[int], length: int) -> list[int]:
        """Returns the reasons why the rows of the first lanes end after these tokens."""
        lanes = list(range(len(tokens)))
        ctx = self.context(torch.empty(0), lanes, [length] * len(lanes))
        ctx.tokens = torch.tensor(tokens).int()
        self.hooks[-1].tokens(ctx)
        return self.state.results[: len(tokens), 1].tolist()


def test_philox_known_answers() -> None:
    # From the test vectors published with the Random123 library.
    cases = {
        (0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0xFFFFFFFF, 0xFFFFFFFF): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    }
    for (count, key), expected in cases.items():
        c, k = torch.tensor([count]), torch.tensor([key])
        out = random.philox((c, c, c, c), (k, k))
        assert tuple(int(word) for word in out) == expected


def test_noise_depends_on_its_counter_alone() -> None:
    seed = int32([[1, 2], [3, 4], [1, 2]])
    index, position = int32([0, 1, 0]), int32([5, 6, 5])
    args = [torch.from_numpy(x) for x in (seed, index, position)]
    together = random.gumbel(*args, VOCAB)
    alone = random.gumbel(*(x[2:] for x in args), VOCAB)
    assert torch.equal(together[0], together[2])
    assert torch.equal(together[2:], alone)
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize(
    ("params", "keep"),
    [
        (SamplingParams(), None),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(temperature=0.5, top_p=0.6), None),
        (SamplingParams(min_p=0.2), None),
        (SamplingParams(temperature=2.0, min_p=0.05, top_k=20, top_p=0.8), None),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, keep: int | None) -> None:
    draws = 20000
    torch.manual_seed(0)
    logits = torch.randn(VOCAB) * 2
    head = Head([params], [[1, 2]], rows=draws)
    # Each draw at a position of its own.
    ctx = head.context(logits.repeat(draws, 1), [0] * draws, list(range(draws)))
    for hook in head.hooks:
        hook.logits(ctx)
    tokens = ctx.tokens
    assert tokens is not None
    expected = oracle(logits.double().numpy(), params)
    seen = np.bincount(tokens.numpy(), minlength=VOCAB) / draws
    assert (seen[expected == 0] == 0).all()
    assert np.abs(seen - expected).sum() < 0.06
    if keep is not None:
        assert (seen > 0).sum() == keep


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Returns the distribution to draw from, computed in float64 with plain loops."""
    scaled = logits / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < params.min_p * probs.max()] = 0
    if params.top_k > 0:
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    probs /= probs.sum()
    total, kept = 0.0, np.zeros_like(probs)
    for token in np.argsort(-probs, kind="stable"):
        if total >= params.top_p:
            break
        kept[token] = probs[token]
        total += probs[token]
    return kept / kept.sum()


def test_penalties_and_bias_match_float64() -> None:
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={3: 50.0, 4: -100.0},
    )
    tokens = [1, 2, 5, 5, 6]
    head = Head([params, SamplingParams(temperature=0.0)], [tokens, tokens])
    torch.manual_seed(1)
    logits = torch.randn(2, VOCAB)
    counts = np.bincount(tokens[2:], minlength=VOCAB)
    want = logits[0].double().numpy().copy()
    for token in set(tokens):
        want[token] = want[token] / 1.3 if want[token] > 0 else want[token] * 1.3
    want -= 0.7 * (counts > 0) + 0.4 * counts
    want[3] += 50.0
    want[4] -= 100.0
    ctx = head.context(logits, [0, 1], [5, 5])
    head.penalties.logits(ctx)
    np.testing.assert_allclose(ctx.logits[0].numpy(), want, atol=1e-5)
    assert torch.equal(ctx.logits[1], logits[1])
    assert ctx.raw is logits
    assert head.sample(logits, 5).tolist() == [3, int(logits[1].argmax())]
    # The sampled token counts from now on.
    assert int(head.penalties.counts[0, 3]) >> 1 == 1


def test_min_tokens_masks_ends_and_stops_are_seen() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,))
    head = Head([params], [[1, 2]])
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 9], logits[0, 11] = 5.0, 4.0, 3.0
    assert head.sample(logits, 4).item() == 11
    assert head.sample(logits, 5).item() == EOS
    assert head.reasons([EOS], 5) == [StopReason.STOP_TOKEN]
    assert head.reasons([9], 5) == [StopReason.STOP_TOKEN]
    assert head.reasons([11], 5) == [StopReason.NONE]
    assert head.reasons([11], 63) == [StopReason.LENGTH]


def test_ignore_eos() -> None:
    head = Head([SamplingParams(temperature=0.0, ignore_eos=True)], [[1, 2]])
    assert head.reasons([EOS], 5) == [StopReason.NONE]


def test_many_stop_tokens() -> None:
    many = tuple(range(20, 60))
    head = Head(
        [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, stop_token_ids=many)],
        [[1, 2], [1, 2]],
    )
    assert head.reasons([59, 59], 5) == [StopReason.NONE, StopReason.STOP_TOKEN]


def test_nan_logits_end_a_row() -> None:
    head = Head([SamplingParams(temperature=0.0), SamplingParams()], [[1, 2], [1, 2]])
    logits = torch.zeros(2, VOCAB)
    logits[:, 40] = torch.nan
    assert head.sample(logits, 5).tolist() == [-1, -1]
    assert head.state.results[:, :3].tolist() == [[0, StopReason.BROKEN, -1]] * 2


def test_truncation_keeps_at_least_one_token() -> None:
    logits = torch.zeros(1, VOCAB)
    kept = truncate.top_k_top_p(logits, torch.tensor([0]), torch.tensor([1e-6]))
    assert int((kept > -torch.inf).sum()) == 1


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.5, [3]), (0.5000001, [3, 1000]), (0.75, [3, 1000]), (1.0, [3, 1000])]
)
def test_a_nucleus_ends_where_its_mass_is_reached(top_p: float, tokens: list[int]) -> None:
    """Two tokens of 0.5 each: one alone reaches 0.5."""
    logits = torch.full((1, WIDE), -torch.inf)
    logits[:, [3, 1000]] = 0.0
    top_k, reach = torch.tensor([0]), torch.tensor([top_p])
    kept = truncate.top_k_top_p(logits, top_k, reach)
    assert (kept > -torch.inf).nonzero()[:, 1].tolist() == tokens

    def prefers_later(entries: torch.Tensor) -> torch.Tensor:
        return entries.float()

    picked, certain = truncate.pick_likely(logits, top_k, reach, prefers_later)
    assert certain.all()
    assert picked.tolist() == tokens[-1:]


def test_logprobs_and_ranks() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCAB)
    tokens = torch.tensor([4, int(logits[1].argmax()), 90])
    lanes = torch.arange(3).int()
    lines = torch.empty(3, WIDTH, dtype=torch.int32)
    wanted = torch.tensor([4, 4, 4]).int()
    rows = LogitRows(lanes, lanes, lanes + 5, torch.zeros_like(lanes))
    token_logprobs(logits, rows, tokens.int(), wanted, lines)
    found = unpack(lines.numpy(), lanes.numpy(), wanted.numpy())
    assert found is not None
    assert found.positions.tolist() == [5, 6, 7]
    ids, values, ranks = found.ids, found.values, found.ranks
    want = torch.log_softmax(logits.double(), dim=-1)
    for row in range(3):
        assert ids[row, 0] == tokens[row]
        order = want[row].argsort(descending=True)
        assert ids[row, 1:].tolist() == order[:4].tolist()
        assert ranks[row] == order.tolist().index(int(tokens[row])) + 1
        for token, value in zip(ids[row], values[row], strict=True):
            assert abs(float(value) - float(want[row, token])) < 1e-5


def test_noise_is_finite_for_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    word = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr(random, "philox", lambda counter, key: (word, word, word, word))
    one = torch.zeros(1, dtype=torch.int32)
    noise = random.gumbel(torch.zeros(1, 2, dtype=torch.int32), one, one, 8)
    assert torch.isfinite(noise).all()


WIDE = 5003
CUTS = [
    (50, 1.0),
    (1, 1.0),
    (0, 0.9),
    (50, 0.9),
    (0, 0.01),
    (400, 0.7),
    (3, 1e-6),
    (WIDE, 0.99),
]


def counters(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(5)
    seed = torch.randint(-(2**31), 2**31, (rows, 2), generator=make).int()
    return seed, torch.arange(rows).int(), torch.arange(rows).int() * 97 + 3


def pick_likely(
    logits: torch.Tensor, cuts: list[tuple[int, float]], at: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    own = [part[at] for part in counters(len(cuts))]
    top_k = torch.tensor([k for k, _ in cuts], dtype=torch.int32)[at]
    top_p = torch.tensor([p for _, p in cuts])[at]
    return truncate.pick_likely(
        logits[at], top_k, top_p, lambda entries: random.gumbel_at(*own, entries)
    )


def test_noise_at_entries_is_the_noise_of_the_whole() -> None:
    whole = random.gumbel(*counters(3), 103)
    entries = torch.tensor([[0, 1, 2, 3, 102], [7, 7, 50, 99, 4], [102, 0, 31, 33, 34]])
    assert torch.equal(random.gumbel_at(*counters(3), entries), whole.gather(1, entries))


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
def test_a_cut_to_few_logits_gives_the_same_token(kind: str) -> None:
    """The token follows the definition, and does not depend on other rows."""
    logits = torch.randn(len(CUTS), WIDE, generator=torch.Generator().manual_seed(6))
    logits *= 0.05 if kind == "flat" else 3.0
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "masked":
        logits[:, 20:] = -torch.inf
    top_k = torch.tensor([k for k, _ in CUTS], dtype=torch.int32)
    top_p = torch.tensor([p for _, p in CUTS])
    kept = truncate.top_k_top_p(logits, top_k, top_p)
    want = (kept + random.gumbel(*counters(len(CUTS)), WIDE)).argmax(dim=-1)
    certain = 0
    for at in (slice(0, 5), *(slice(row, row + 1) for row in range(len(CUTS)))):
        tokens, sure = pick_likely(logits, CUTS, at)
        assert torch.equal(tokens[sure], want[at][sure])
        certain += int(sure.sum())
    if kind != "flat":
        assert certain >= 8
    assert not pick_likely(logits, CUTS, slice(len(CUTS) - 1, None))[1].any()


def test_rows_of_all_kinds_share_a_batch() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0.7, min_p=0.2),
        SamplingParams(top_p=0.5, min_p=0.01),
    ]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(7)) * 3
    head = Head(params, [[1, 2]] * len(params))
    together = head.sample(logits, 9)
    for lane in range(len(params)):
        alone = head.sample(logits[lane : lane + 1], 9, [lane])
        assert alone.item() == together[lane]
