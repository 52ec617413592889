"""Pipelines: layers in stages, and workers whose tokens arrive late. No processes are started."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError
from quire.models.stages import balanced_ranges
from quire.ops.reference.step import ENDED, finish_rows
from quire.ops.rows import PROMPT, LogitRows, StepRows
from quire.parallel.pipeline import stage_of
from quire.runner.stages import accept_results
from quire.sampling_params import SamplingParams
from tests.local_stages import LocalStages
from tests.slow import slow
from tests.tiny_engine import TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

MIXED = {
    **TINY,
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
"""Four layers, of which the first stages have none that see everything."""
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, n=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=12, min_tokens=3),
]
JOBS = [
    Job(prompt, PARAMS[i % 3], seed=i) for i, prompt in enumerate(random_prompts(7, 40, seed=7))
]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    found = balanced_ranges(sizes, count)
    assert [index for layers in found for index in layers] == list(range(len(sizes)))
    assert len(found) == count
    assert all(found)
    cuts = itertools.combinations(range(1, len(sizes)), count - 1)
    ways = ([*itertools.pairwise((0, *cut, len(sizes)))] for cut in cuts)
    least = min(max(sum(sizes[low:high]) for low, high in way) for way in ways)
    assert max(sum(sizes[index] for index in layers) for layers in found) == least


def test_stages_take_as_long_as_each_other() -> None:
    """The first stage has more layers, because the head takes time and embeddings do not, unless
    memory would become uneven."""
    times, sizes = [1.5] * 7 + [4.5], [6.0] + [1.0] * 6 + [4.0]
    even = balanced_ranges(times, 2)
    assert [len(layers) for layers in even] == [5, 3]
    assert balanced_ranges(times, 2, sizes, 10.0) == even
    assert [len(own) for own in balanced_ranges(times, 2, sizes, 9.0)] == [4, 4]


def test_the_engine_is_in_the_last_stage() -> None:
    assert [stage_of(rank, 6, 3) for rank in range(6)] == [2, 2, 1, 1, 0, 0]


@given(st.integers(0, 2**32))
def test_results_act_the_same_in_every_stage(seed: int) -> None:
    """Prompts, generating rows with and without drafts, lanes that have ended, stop tokens,
    lengths, broken logits."""
    draw = random.Random(seed)
    rows, width, stop, drafts = 6, 14, 3, 3
    lanes = draw.sample(range(8), rows)
    tokens = torch.tensor([[draw.randrange(4) for _ in range(width)] for _ in range(8)]).int()
    position = torch.tensor([draw.randrange(width - 1 - drafts) for _ in range(8)]).int()
    prompt = [draw.random() < 0.3 for _ in lanes]
    ended = [not own and draw.random() < 0.3 for own in prompt]
    for lane, gone in zip(lanes, ended, strict=True):
        position[lane] = ENDED if gone else position[lane]
    own = torch.tensor(lanes)
    each = torch.tensor([1 if known else 1 + draw.randrange(1 + drafts) for known in prompt])
    starts = torch.cat([torch.zeros(1), each.cumsum(0)]).int()
    row = torch.repeat_interleave(torch.arange(rows), each)
    ahead = (torch.arange(len(row)) - starts[row]).int()
    known = torch.tensor(prompt)
    step = StepRows(own.int(), starts, starts, (known * PROMPT).int())
    given_lanes = torch.where(torch.tensor(ended), -1, own).int()[row]
    lengths = (position[own] + 1 - known.int())[row] + ahead
    logit_rows = LogitRows(given_lanes, torch.arange(len(row)).int(), lengths, ahead)
    # Mostly the drafted tokens.
    sampled = torch.tensor(
        [
            draw.randrange(-1, 4) if draw.random() < 0.4 else int(tokens[lanes[i], at])
            for i, at in zip(row.tolist(), lengths.tolist(), strict=True)
        ]
    ).int()
    expected = tokens.clone(), position.clone()
    results = torch.empty(rows, 3 + drafts, dtype=torch.int32)
    finish_rows(
        step, logit_rows, sampled, results, position=expected[1], tokens=expected[0],
        max_total=torch.tensor([draw.randrange(1, 20) for _ in range(8)]).int(),
        min_total=torch.zeros(8).int(), num_stops=torch.ones(8).int(),
        stops=torch.full((8, 1), stop).int(),
    )  # fmt: skip
    accept_results(results, own, known.long(), position, tokens)
    assert torch.equal(position, expected[1])
    assert torch.equal(tokens, expected[0])


def engines(folder: Path, stages: int, **settings: Any) -> list[TinyEngine]:
    """Returns an engine of one worker, and one of stages."""
    pipeline = {"stages": stages, "make_executor": LocalStages}
    return [TinyEngine(folder, budget=64, **settings, **more) for more in ({}, pipeline)]


@pytest.mark.parametrize(
    ("config", "stages", "depth", "blocks"),
    [(TINY, 2, 2, 200), (TINY, 3, 4, 24), (MIXED, 2, 3, 40), (HYBRID, 4, 5, 40)],
    ids=["two", "three-few-blocks", "windows", "states"],
)
def test_stages_give_the_tokens_of_one(
    tmp_path: Path, config: dict[str, Any], stages: int, depth: int, blocks: int
) -> None:
    """Chunked prompts, prefix hits, siblings, log-probabilities; preemption with few blocks."""
    one, many = engines(model_folder(tmp_path, config), stages, depth=depth, blocks=blocks)
    again = [Job([*job.prompt, 9], job.params, job.seed) for job in JOBS]
    for jobs in (JOBS, again):
        assert many.run(jobs) == one.run(jobs)
    values = [
        sorted(p.logprobs.values[:, 0].sum() for p in engine.progress if p.logprobs is not None)
        for engine in (one, many)
    ]
    assert sum(values[0]) == pytest.approx(sum(values[1]), rel=1e-4)
    # Each parameter is in one stage, but for embeddings that the head is tied to.
    held = Counter(
        name
        for runner in many.executor.runners
        for name, parameter in runner.model.named_parameters()
        if not parameter.is_meta
    )
    assert held.keys() == dict(one.runner.model.named_parameters()).keys()
    twice = {name for name, count in held.items() if count > 1}
    assert twice == ({"embedding.weight"} if config["tie_word_embeddings"] else set())


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_aborted_requests_and_reused_lanes(tmp_path: Path, seed: int) -> None:
    """Late results of a lane's last request do not affect the next one."""
    draw = random.Random(seed)
    folder = model_folder(tmp_path, TINY)
    one, many = engines(folder, 3, depth=3, lanes=3, blocks=30)
    params = [SamplingParams(temperature=0.8, max_tokens=draw.randrange(1, 20)) for _ in range(12)]
    jobs = [
        Job(prompt, p, seed=i)
        for i, (prompt, p) in enumerate(zip(random_prompts(12, 30, seed), params, strict=True))
    ]
    requests = [request for i, job in enumerate(jobs) for request in many.add(str(i), job)]
    aborted = set()
    while many.scheduler.has_work():
        if draw.random() < 0.2:
            victim = draw.choice(requests)
            if many.scheduler.abort(victim.request_id) is not None:
                aborted.add(victim.request_id)
        many.step()
    expected = one.run(jobs)
    for request, tokens in zip(requests, expected, strict=True):
        got = request.output.tolist()
        assert got == tokens[: len(got)]
        assert request.request_id in aborted or got == tokens


def test_steps_in_flight_share_the_requests(tmp_path: Path) -> None:
    """Requests whose prompts end in the same step are divided among the following steps."""
    one, many = engines(model_folder(tmp_path, TINY), 2, depth=2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    jobs = [Job(prompt, params) for prompt in random_prompts(8, 7, seed=1)]
    assert many.run(jobs) == one.run(jobs)
    sizes = [plan.num_rows for plan in many.plans[2:-2]]
    assert set(sizes) == {4}


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(
            EngineArgs(
                model=str(folder), device="cpu", skip_tokenizer_init=True,
                pipeline_parallel_size=2, **settings,
            )
        )  # fmt: skip
    return str(error.value)


def test_features_that_stages_do_not_support_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TINY)
    for name, value in (("enable_lora", True), ("host_cache_gb", 1.0), ("lora_dir", "/x")):
        message = refusal(folder, **{name: value})
        assert message.startswith(f"{name} is not supported with pipeline_parallel_size=2: ")
    assert "which is 3" in refusal(folder, steps_in_flight=4)
    shallow = model_folder(tmp_path / "shallow", {**TINY, "num_hidden_layers": 1})
    assert "the model has 1 layer" in refusal(shallow)


def test_whole_experts_need_ranks_and_experts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TINY)
    for size, lack in ((1, "at least 2"), (2, "a model with experts")):
        with pytest.raises(ConfigError, match=f"enable_expert_parallel needs .*{lack}"):
            resolve(
                EngineArgs(
                    model=str(folder), device="cpu", skip_tokenizer_init=True,
                    tensor_parallel_size=size, enable_expert_parallel=True,
                )
            )  # fmt: skip
