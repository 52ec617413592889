"""A model with recurrent states in the real engine: tokens do not depend on cache hits, chunks of
the prompt, or other requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.sampling_params import SamplingParams
from tests.features.speculation.test_drafts import Answers, Script, Verifier, answers, with_texts
from tests.slow import slow
from tests.tiny_engine import MAX_LEN, TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

HYBRID: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("hybrid") / "model", HYBRID)


def greedy(count: int = 12, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)  # type: ignore[arg-type]


_tokens: dict[str, list[list[int]]] = {}
"""Tokens of jobs that ran alone."""


def alone(folder: Path, jobs: list[Job]) -> list[list[int]]:
    """Each job's tokens from an engine without a cache or other requests."""
    new = [job for job in jobs if repr(job) not in _tokens]
    engine = TinyEngine(folder, prefix_caching=False) if new else None
    for job in new:
        assert engine is not None
        _tokens[repr(job)] = engine.run([job])
    return [tokens for job in jobs for tokens in _tokens[repr(job)]]


@pytest.mark.parametrize(("budget", "depth"), [(7, 2), slow(7, 1), slow(256, 1), (256, 2)])
def test_batches_chunks_and_hits(folder: Path, depth: int, budget: int) -> None:
    prompts = random_prompts(3)
    shared = random_prompts(1, 120, seed=3)[0]
    jobs = [Job(prompt, greedy()) for prompt in prompts]
    jobs += [Job(shared + prompt, greedy()) for prompt in prompts]
    expected = alone(folder, jobs)
    engine = TinyEngine(folder, depth=depth, budget=budget)
    assert engine.run(jobs) == expected
    assert engine.run(jobs) == expected
    assert engine.scheduler.stats().prefix_hit_tokens > 0
    for job, tokens in zip(jobs, expected, strict=True):
        longer = Job([*job.prompt, *tokens, 9, 8, 7], greedy(5))
        assert engine.run([longer]) == alone(folder, [longer])


@pytest.mark.parametrize("step", [slow(3), 7])
def test_every_length_of_a_shared_prefix(folder: Path, step: int) -> None:
    """Blocks have 8 tokens, and prefixes end at every position of a block."""
    engine = TinyEngine(folder, budget=64)
    prompt = random_prompts(1, 100, seed=7)[0][:40] * 2
    for length in range(1, len(prompt), step):
        job = Job([*prompt[:length], 11, 12], greedy(4))
        assert engine.run([job]) == alone(folder, [job]), length


@pytest.mark.parametrize("depth", [slow(1), 2])
def test_preempted_requests_go_on(folder: Path, depth: int) -> None:
    jobs = [Job(prompt, greedy(24)) for prompt in random_prompts(6, 30, seed=2)]
    engine = TinyEngine(folder, depth=depth, blocks=20)
    assert engine.run(jobs) == alone(folder, jobs)
    assert engine.scheduler.stats().preemptions > 0


def test_completions_of_one_prompt(folder: Path) -> None:
    prompt = random_prompts(1, 90, seed=5)[0]
    params = SamplingParams(temperature=1.0, max_tokens=12, n=4, ignore_eos=True)
    expected = alone(folder, [Job(prompt, params, seed=4)])
    engine = TinyEngine(folder, depth=2)
    assert engine.run([Job(prompt, params, seed=4)]) == expected
    assert len({tuple(tokens) for tokens in expected}) == 4


def test_ends_that_the_device_sees_leave_a_state(folder: Path) -> None:
    """With two steps in flight, rows that are launched before the end is known change nothing."""
    prompts = random_prompts(8, 50, seed=9)
    params = SamplingParams(temperature=1.0, max_tokens=32)
    engine = TinyEngine(folder, depth=2)
    jobs = [Job(prompts[i], params, seed=i) for i in (0, 3, 5, 6)]  # the first and last stop
    expected = alone(folder, jobs)
    assert engine.run(jobs) == expected
    stopped = [(j, out) for j, out in zip(jobs, expected, strict=True) if out[-1] == 5]
    assert len(stopped) > 1
    for job, out in stopped:
        before = engine.scheduler.stats().prefix_hit_tokens
        longer = Job([*job.prompt, *out, 20, 21], greedy(6))
        assert engine.run([longer]) == alone(folder, [longer])
        hit = engine.scheduler.stats().prefix_hit_tokens - before
        assert hit == len(job.prompt) + len(out) - 1


def _launch(engine: TinyEngine) -> None:
    """Launches one more step, and collects none."""
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.executor.submit(plan)


def _hits(engine: TinyEngine, folder: Path, tokens: list[int]) -> int:
    """Runs a prompt that begins with these tokens; returns how many of them were cached."""
    before = engine.scheduler.stats().prefix_hit_tokens
    job = Job([*tokens, 20, 21], greedy(6))
    assert engine.run([job]) == alone(folder, [job])
    return engine.scheduler.stats().prefix_hit_tokens - before


def test_an_abort_keeps_the_state_of_a_chunk_in_flight(folder: Path) -> None:
    """The device computes the chunk before any later step, so later requests can continue from its
    end."""
    prompt = random_prompts(1, 120, seed=3)[0][:60]
    engine = TinyEngine(folder, depth=2, budget=13)
    (request,) = engine.add("a", Job(prompt, greedy()))
    _launch(engine)
    _launch(engine)
    assert (request.computed, request.planned, request.generating) == (0, 26, False)
    engine.scheduler.abort(request.request_id)
    engine.drain()
    assert _hits(engine, folder, prompt[:26]) == 26


@pytest.mark.parametrize("config", [HYBRID, TINY], ids=["hybrid", "attention"])
@pytest.mark.parametrize(
    ("length", "in_flight"), [(18, 0), (20, 0), (16, 1), (20, 1), (19, 2), (20, 2), (21, 2)]
)
def test_an_abort_while_tokens_are_in_flight(
    tmp_path: Path, config: dict[str, object], length: int, in_flight: int
) -> None:
    """All tokens except the last known one can be reused. A state that steps in flight change
    cannot, so only the prompt's checkpoints remain. Blocks have 8 tokens."""
    folder = model_folder(tmp_path / "model", config)
    prompt = random_prompts(1, 120, seed=3)[0][:length]
    engine = TinyEngine(folder, depth=2)
    (request,) = engine.add("a", Job(prompt, greedy()))
    while request.num_output_tokens < 3:
        engine.step()
    while engine.scheduler.num_in_flight:
        engine.progress.append(engine.scheduler.update(engine.executor.collect()))
    for _ in range(in_flight):
        _launch(engine)
    assert request.planned == request.computed + in_flight
    known = [*prompt, *request.output.tolist()]
    engine.scheduler.abort(request.request_id)
    engine.drain()
    before = engine.scheduler.stats().prefix_hit_tokens
    job = Job([*known, 20, 21], greedy(4))
    expected = TinyEngine(folder, prefix_caching=False).run([job])
    assert engine.run([job]) == expected
    hits = engine.scheduler.stats().prefix_hit_tokens - before
    if in_flight and config is HYBRID:
        assert hits <= length
    else:
        assert hits == len(known) - 1


def test_penalties_and_logprobs(folder: Path) -> None:
    prompts = random_prompts(3, 40, seed=11)
    params = greedy(10, repetition_penalty=1.3, logprobs=3, prompt_logprobs=2)
    jobs = [Job(prompt, params) for prompt in prompts]
    assert TinyEngine(folder, depth=2, budget=16).run(jobs) == alone(folder, jobs)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("right", {"depth": 1, "budget": 11}),
        ("mixed", {"depth": 2, "budget": 48}),
        ("partly", {"depth": 3, "blocks": 34}),
    ],
)
def test_drafts_change_nothing(
    folder: Path, kind: str, settings: dict[str, int], without: tuple[Answers, dict[str, list[int]]]
) -> None:
    """States continue after any draft, in the next step or from a checkpoint."""
    expected, texts = without
    engine = TinyEngine(
        folder, hooks=[Verifier()], features=[Script(texts, kind)], dtype="float64",
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    assert answers(engine) == expected
    assert max(n for step in engine.progress for n in step.n_tokens.tolist()) > 1
    if "blocks" in settings:
        assert engine.scheduler.stats().preemptions > 0


@pytest.fixture(scope="module")
def without(folder: Path) -> tuple[Answers, dict[str, list[int]]]:
    """The answers without drafts, and all tokens of each request."""
    return with_texts(TinyEngine(folder, dtype="float64"))


def test_requests_that_end_behind_drafts_leave_a_state(folder: Path) -> None:
    """The next turn continues from the state after the last row's accepted drafts."""
    prompt = random_prompts(1, 50, seed=9)[0]
    params = SamplingParams(temperature=1.0, max_tokens=80)
    for seed in range(2):
        job = Job(prompt, params, seed=seed)
        out = TinyEngine(folder, dtype="float64").run([job])[0]
        script = Script({"0-0": [*prompt, *out]}, "right", seed)
        engine = TinyEngine(folder, hooks=[Verifier()], features=[script], dtype="float64", depth=2)
        assert engine.run([job]) == [out]
        script.kind = "none"
        longer = Job([*prompt, *out, 20, 21], greedy(6))
        assert engine.run([longer]) == TinyEngine(folder, dtype="float64").run([longer])
        hit = engine.scheduler.stats().prefix_hit_tokens
        assert hit == len(prompt) + len(out) - 1
