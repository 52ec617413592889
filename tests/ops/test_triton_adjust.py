"""The kernel that adjusts logits against the runner's own sampler."""

from __future__ import annotations

import pytest
import torch

from quire.arrays import int32
from quire.ops.triton.adjust import adjust
from quire.plan import Admit, KVGroup, StepPlan
from quire.runner.batch_state import BatchState
from quire.runner.sampling import Sampler
from quire.runner.staging import Staging
from quire.sampling_params import SamplingParams

VOCAB = 5003
EOS = 4999
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4),
    SamplingParams(logit_bias={5: 3.0, 2047: -7.5, 2048: 1.0, EOS: 50.0}),
    SamplingParams(min_tokens=4, stop_token_ids=[17, 2048]),
    SamplingParams(min_tokens=4, stop_token_ids=[17], logit_bias={17: 9.0, EOS: 9.0, 3: 1.0}),
    SamplingParams(repetition_penalty=0.8, logit_bias={i * 3: i / 100 for i in range(1000)}),
    SamplingParams(min_tokens=2, stop_token_ids=[17]),
]


def admitted(device: str, length: int) -> Sampler:
    """A sampler whose lane i runs `PARAMS[i]`, with a prompt of three tokens."""
    state = BatchState(len(PARAMS) + 1, 64, (KVGroup(layers=(0,)),), torch.device(device))
    sampler = Sampler(state, VOCAB, (EOS,))
    none = int32([])
    draw = torch.Generator().manual_seed(3)
    admits = [
        Admit(i, 0, str(i), int32(torch.randint(VOCAB, (length,), generator=draw)), 3, 0, 64, p, i)
        for i, p in enumerate(PARAMS)
    ]
    plan = StepPlan(0, none, none, none, none, admits=admits)
    upload = Staging(torch.device(device), 2).begin()
    state.stage(plan, upload)
    sampler.stage(plan, upload)
    upload.send()
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjusts_as_the_sampler_does(kernel_device: str, dtype: torch.dtype) -> None:
    length = 6
    sampler = admitted(kernel_device, length)
    columns, rows = sampler.adjust, len(PARAMS)
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(rows + 1, VOCAB, generator=make).mul(4).to(dtype).to(kernel_device)
    order = torch.randperm(rows, generator=make)
    lanes = torch.cat([order, torch.tensor([-1])]).int().to(kernel_device)
    lengths = torch.full((rows + 1,), length, dtype=torch.int32, device=kernel_device)
    found = adjust(
        logits, lanes, lengths,
        repetition=sampler.floats[:, 3], presence=sampler.floats[:, 4],
        frequency=sampler.floats[:, 5], counts=columns.counts, num_bias=columns.num_bias,
        bias_ids=columns.bias_ids, bias_values=columns.bias_values, stops=sampler.stops,
        min_total=sampler.state.min_total,
    )  # fmt: skip
    want, own = logits[:rows].float(), lanes[:rows].long()
    every = torch.arange(rows, device=kernel_device)
    columns.penalize(want, every, own, sampler.floats[own, 3:6])
    columns.add_bias(want, every, own)
    columns.mask_ends(want, own, lengths[:rows], sampler.stops)
    torch.testing.assert_close(found[:rows], want, rtol=1e-6, atol=1e-6)
    masked = {lane: found[i].isneginf().sum().item() for i, lane in enumerate(own.tolist())}
    assert masked == {0: 0, 1: 0, 2: 0, 3: 0, 4: 3, 5: 2, 6: 0, 7: 0}
