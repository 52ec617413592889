"""The kernel that adjusts logits against its twin, and both against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.arrays import int32
from quire.ops import LogitRows, reference
from quire.ops.triton.step.adjust import adjust
from quire.plan import Admit, KVGroup, StepPlan
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.penalties import Penalties
from quire.runner.readback import PinnedRing, Upload
from quire.runner.state import BatchState, Limits
from quire.sampling_params import SamplingParams

VOCAB = 5003
EOS = 4999
LENGTH = 6
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4),
    SamplingParams(logit_bias={5: 3.0, 2047: -7.5, 2048: 1.0, EOS: 50.0}),
    SamplingParams(min_tokens=4, stop_token_ids=[17, 2048]),
    SamplingParams(min_tokens=4, stop_token_ids=[17], logit_bias={17: 9.0, EOS: 9.0, 3: 1.0}),
    SamplingParams(repetition_penalty=0.8, logit_bias={i * 3: i / 100 for i in range(1000)}),
    SamplingParams(min_tokens=2, stop_token_ids=[17]),
    SamplingParams(repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.6),
]


def admitted(device: str) -> tuple[BatchState, dict[str, Tensor], Tensor]:
    """Returns a state whose lane i runs `PARAMS[i]`, the columns that the op reads, and the lanes'
    tokens.

    Each lane has a prompt of three tokens and three generated tokens."""
    own = torch.device(device)
    penalties = Penalties(VOCAB)
    hooks = penalties, Acceptance((EOS,), penalties)
    limits = Limits(lanes=len(PARAMS) + 1, tokens=8, logit_rows=64, length=64)
    columns = [column for hook in hooks for column in hook.columns(limits)]
    state = BatchState(limits, (KVGroup(layers=(0,)),), own, columns)
    none = int32([])
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (len(PARAMS), LENGTH), generator=draw)
    admits = [Admit(i, 0, str(i), int32(tokens[i]), 3, 0, 64, p, i) for i, p in enumerate(PARAMS)]
    plan = StepPlan(0, none, none, none, none, admits=admits)
    upload = Upload(PinnedRing(own, 2), state.memory)
    for hook in hooks:
        hook.bind(state)
        hook.stage(plan, upload)
    least = int32([a.prompt_len + a.params.min_tokens for a in admits])
    upload.put_lines(state.min_total, int32(range(len(admits))), least)
    upload.send()
    state.tokens[: len(PARAMS), :LENGTH] = tokens.int().to(own)
    names = "penalties", "num_bias", "bias_ids", "bias_values", "num_stops", "stops", "min_total"
    read = {name: state.columns[name] for name in names}
    return state, {**read, "counts": state.columns["token_counts"]}, tokens


def exact(logits: Tensor, lane: int, tokens: list[int], drafts: list[int]) -> Tensor:
    """Computes one row in float64, in plain Python."""
    params, x = PARAMS[lane], logits.double().clone()
    generated = [*tokens[3:], *drafts]
    for token in {*tokens, *drafts}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(generated):
        x[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(tokens) + len(drafts) < 3 + params.min_tokens:
        x[[EOS, *params.stop_token_ids]] = -torch.inf
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [reference.adjust, adjust], ids=["twin", "kernel"])
def test_adjusts_in_any_order(kernel_device: str, dtype: torch.dtype, side: Any) -> None:
    state, columns, tokens = admitted(kernel_device)
    count = len(PARAMS)
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(count + 1, VOCAB, generator=make).mul(4).to(dtype).to(kernel_device)
    before = logits.clone()
    order = torch.randperm(count, generator=make)
    lanes = torch.cat([order, torch.tensor([-1])]).int().to(kernel_device)
    lengths = torch.full((count + 1,), LENGTH, dtype=torch.int32, device=kernel_device)
    rows = LogitRows(lanes, lengths, lengths, torch.zeros_like(lanes))
    found = side(logits, rows, state.tokens, **columns)
    assert found.dtype == torch.float32
    assert torch.equal(logits, before)
    for row, lane in enumerate(order.tolist()):
        want = exact(before[row].cpu(), lane, tokens[lane].tolist(), [])
        torch.testing.assert_close(found[row].cpu().double(), want, rtol=1e-6, atol=1e-6)
    masked = {lane: found[i].isneginf().sum().item() for i, lane in enumerate(order.tolist())}
    assert masked == {0: 0, 1: 0, 2: 0, 3: 0, 4: 3, 5: 2, 6: 0, 7: 0, 8: 0}


@pytest.mark.parametrize("side", [reference.adjust, adjust], ids=["twin", "kernel"])
def test_drafts_ahead_count_as_generated(kernel_device: str, side: Any) -> None:
    """Each row of a lane has one draft more than the previous row; drafts may repeat, or equal
    earlier tokens."""
    state, columns, tokens = admitted(kernel_device)
    make = torch.Generator().manual_seed(1)
    for lane in (2, 4, 6, 8, 0):
        known = tokens[lane].tolist()
        drafts = [known[1], 77, 77, known[4], 5002]
        end = LENGTH + len(drafts)
        state.tokens[lane, LENGTH:end] = torch.tensor(drafts).int().to(kernel_device)
        ahead = torch.tensor([3, 0, 5, 1], dtype=torch.int32, device=kernel_device)
        lanes = torch.tensor([lane] * 4, dtype=torch.int32, device=kernel_device)
        logits = torch.randn(4, VOCAB, generator=make).to(kernel_device)
        rows = LogitRows(lanes, lanes, LENGTH + ahead, ahead)
        found = side(logits, rows, state.tokens, **columns)
        for row, count in enumerate(ahead.tolist()):
            want = exact(logits[row].cpu(), lane, known, drafts[:count])
            torch.testing.assert_close(found[row].cpu().double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("side", [reference.adjust, adjust], ids=["twin", "kernel"])
def test_ends_beyond_the_vocabulary_change_nothing(kernel_device: str, side: Any) -> None:
    """A checkpoint may have end tokens beyond the head's vocabulary."""
    state, columns, _ = admitted(kernel_device)
    columns["stops"][4, :3] = torch.tensor([VOCAB, VOCAB + 9, 17]).int().to(kernel_device)
    logits = torch.zeros(2, VOCAB, device=kernel_device)
    at = torch.tensor([4, 0], dtype=torch.int32, device=kernel_device)
    length = torch.full((2,), LENGTH, dtype=torch.int32, device=kernel_device)
    found = side(logits, LogitRows(at, at, length, 0 * at), state.tokens, **columns)
    assert found.isneginf().nonzero().tolist() == [[0, 17]]
