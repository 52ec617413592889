"""With `deterministic`, a request's log-probabilities do not depend on the batch, to the bit.

With an optimization switched off, the tokens stay the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import OPTIMIZATIONS
from quire.ops import KVLayer, Policy, use_policy
from quire.ops.arguments import RmsScale
from quire.ops.triton.attention.attention import paged_attention
from quire.ops.triton.collectives.segments import segment_sum
from quire.ops.triton.launch import compiling
from quire.ops.triton.linear import linear
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs
from quire.ops.weight import Weight, WeightFormat
from tests.ops.test_triton_quantized import drawn
from tests.tiny_engine import TINY, TINY_WINDOW, VOCAB

BIG = {**TINY, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 2000}
MINE = [
    SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=50, ignore_eos=True, logprobs=5),
]
Answer = list[tuple[int, list[tuple[int, float]]]]


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB) for _ in range(length)]


class Engine:
    def __init__(self, folder: Path, config: dict[str, Any], **settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        common = {"num_kv_blocks": 2000, "max_num_seqs": 80, "enable_prefix_caching": False}
        self.llm = LLM(
            str(folder), device="cuda", dtype="bfloat16", load_format="dummy",
            skip_tokenizer_init=True, **{**common, **settings},
        )  # fmt: skip

    def ask(self, mine: SamplingParams, others: int = 0) -> Answer:
        """Tokens and log-probabilities of one request, among others of many lengths."""
        draw = random.Random(others)
        prompts = [prompt(0, 90)] + [
            prompt(i, draw.randrange(1, 150)) for i in range(1, others + 1)
        ]
        rest = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
        place = draw.randrange(len(prompts))
        prompts.insert(place, prompts.pop(0))
        params = [mine if i == place else rest for i in range(len(prompts))]
        output = self.llm.generate(prompts, params, use_tqdm=False)[place].outputs[0]
        assert output.logprobs is not None
        return [
            (token, sorted((id, entry.logprob) for id, entry in found.items()))
            for token, found in zip(output.token_ids, output.logprobs, strict=True)
        ]


@pytest.mark.parametrize("config", [BIG, TINY_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("mine", MINE, ids=["greedy", "sampled"])
def test_deterministic(tmp_path: Path, config: dict[str, Any], mine: SamplingParams) -> None:
    alone = Engine(tmp_path, config, deterministic=True)
    want = alone.ask(mine)
    assert len(want) == 50
    assert alone.ask(mine, others=64) == want
    assert alone.ask(mine, others=5) == want
    alone.llm.shutdown()
    for settings in (
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 97, "steps_in_flight": 1},
        {"num_kv_blocks": 60, "max_num_seqs": 20},
        {"enforce_eager": True},
        {"enable_prefix_caching": True},
    ):
        engine = Engine(tmp_path, config, deterministic=True, **settings)
        others = 20 if "num_kv_blocks" in settings else 64
        found = [engine.ask(mine, others=others), engine.ask(mine)]
        engine.llm.shutdown()
        assert found == [want, want], settings


FORMATS = {
    "bfloat16": None,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128),
    "int4-g128": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_products_do_not_depend_on_other_rows(name: str) -> None:
    rows, outputs, inputs, form = 1100, 768, 1024, FORMATS[name]
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    weight = (
        Weight.plain(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16))
        if form is None
        else drawn(form, outputs, inputs)
    )
    norm = RmsScale(torch.rand(inputs, device="cuda", dtype=torch.bfloat16), 1e-6)
    layers: dict[str, Callable[[slice], torch.Tensor]] = {
        "gated": lambda part: linear(x[part], weight, norm=norm, act="silu_and_mul"),
        "plain": lambda part: linear(x[part], weight),
        "segments": lambda part: segment_sum(
            x[part], weight, 8, torch.bfloat16, None, residual[part]
        ),
    }
    with use_policy(Policy(deterministic=True)):
        for kind, layer in layers.items():
            whole = layer(slice(rows))
            assert whole.isfinite().all()
            for size in (1, 7, 16, 17, 33, 64, 65, 129, 257, 513):
                part = slice(3, 3 + size)
                assert torch.equal(layer(part), whole[part]), (kind, size)


# Rows, outputs, inputs of a step, stages, warps, and whether weights are the left operand. The last
# three are multiplied by `mma.sync`, the others by `wgmma`.
TILES = [
    (64, 64, 64, 3, 4, False), (64, 64, 64, 3, 4, True), (16, 64, 128, 4, 4, True),
    (32, 64, 128, 3, 4, True), (128, 64, 64, 3, 8, True), (256, 128, 64, 3, 8, True),
    (128, 128, 32, 3, 8, True), (64, 32, 128, 3, 4, False), (128, 128, 64, 4, 4, False),
    (16, 32, 64, 3, 4, False), (8, 64, 64, 3, 4, True), (16, 64, 64, 3, 1, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_has_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.exp2(torch.randn(256, 1024, device="cuda") * 3)
    x = (torch.randn(256, 1024, device="cuda") * wide).to(dtype)
    weight = (torch.randn(512, 1024, device="cuda") * 0.03).to(dtype)
    args = LinearArgs(x, Weight.plain(weight))
    plans = [
        GemmPlan("skinny", bm=bm, bn=bn, bk=bk, stages=stages, warps=warps, swap=swap)
        for bm, bn, bk, stages, warps, swap in TILES
    ]
    with compiling(4):
        for plan in plans:
            small.run(args, plan, out_dtype=torch.float32)
    first, *others = (small.run(args, plan, out_dtype=torch.float32) for plan in plans)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize(
    ("dim", "group", "more"),
    [
        (128, 2, {}),
        (64, 4, {}),
        (128, 4, {"window": 100}),
        (128, 2, {"softcap": 30.0}),
    ],
)
def test_a_tokens_attention_does_not_depend_on_its_step(
    dim: int, group: int, more: dict[str, Any]
) -> None:
    """Computes a prompt in one step, in parts, and token by token, among other rows."""
    torch.manual_seed(0)
    length, kv_heads = 700, 4
    k, v = (
        torch.randn(150, kv_heads, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    kv = KVLayer(k, v)
    table = torch.randperm(150, device="cuda", dtype=torch.int32)[:132].view(3, 44)
    q = torch.randn(length, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)

    def attend(
        q: torch.Tensor, starts: list[int], seq: list[int], order: list[int], longest: int = length
    ) -> torch.Tensor:
        return paged_attention(
            q, kv, torch.tensor(starts, dtype=torch.int32, device="cuda"),
            torch.tensor(seq, dtype=torch.int32, device="cuda"), table[order],
            max_q_len=longest, max_seq_len=length, scale=dim**-0.5, **more,
        )  # fmt: skip

    with use_policy(Policy(deterministic=True)):
        whole = attend(q, [0, length], [length], [0])
        for chunk in (1, 97, 128, 300):
            for first in range(0, length, chunk if chunk > 1 else 61):
                part = q[first : first + chunk]
                end = first + len(part)
                mixed = torch.cat((q[:33], part, q[5:6]))
                starts = [0, 33, 33 + len(part), 34 + len(part)]
                found = attend(mixed, starts, [233, end, 650], [1, 0, 2])
                assert torch.equal(found[33 : 33 + len(part)], whole[first:end]), (chunk, first)
        for first in range(0, length, 7):
            trio = torch.cat((q[:1], q[first : first + 1], q[5:6]))
            found = attend(trio, [0, 1, 2, 3], [233, first + 1, 650], [1, 0, 2], longest=1)
            assert torch.equal(found[1], whole[first]), first


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_switched_off(tmp_path: Path, name: str) -> None:
    mine = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [prompt(i, 10 + 3 * i) for i in range(30)]
    found = []
    for disable in ((), (name,)):
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        llm = LLM(
            str(tmp_path), device="cuda", dtype="float32", load_format="dummy", disable=disable,
            skip_tokenizer_init=True, num_kv_blocks=400,
        )  # fmt: skip
        outputs = llm.generate(prompts, mine, use_tqdm=False)
        llm.shutdown()
        found.append([output.outputs[0].token_ids for output in outputs])
    same = sum(a == b for a, b in zip(*found, strict=True))
    # Sums in another order may turn a close choice.
    assert same >= 27
